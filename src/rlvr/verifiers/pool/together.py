"""Batching of the jobs of a quick verifier that arrive at nearly the same moment: they wait in the caller's loop and
are sent as one.

A job by itself costs a fifth of a millisecond on its way to a worker and back, and most of that again on its way to the
pool's loop. Invariant: whatever goes wrong with several, each is then done alone, under its own limit, so that no
answer pays for another's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from rlvr.records import Verdict
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.pool.threads import cores
from rlvr.verifiers.pool.wire import VerifierJob

log = logging.getLogger(__name__)

# Ten times what a message to a worker and back costs (0.17 to 0.2 ms, docs/performance.md): slower verifiers gain
# little from going together.
QUICK = 0.002
"""Mean seconds for a verdict up to which a verifier is quick."""
# Weight of an exponential mean: about the last twenty verdicts. Arbitrary.
SHARE = 0.1
"""Weight of the newest verdict in that mean."""
# Bundles of 16, 32 and 64 were within 1 ms of each other (docs/log.md).
MOST = 32
"""Jobs of one worker at a time."""
WORTH = 0.001
"""Seconds of work that are worth another worker."""
# Two full bundles.
ENOUGH = 64
"""Waiting jobs that are sent without further delay."""

Found: TypeAlias = "list[Verdict] | None"
"""The verdicts of a job; None if it must be done alone."""


class LatencyAverage:
    """The recent latency of a verifier."""

    def __init__(self) -> None:
        self._mean: float | None = None

    @property
    def quick(self) -> bool:
        """Return True if its jobs may be sent together. From any thread."""
        return self._mean is not None and self._mean <= QUICK

    def note(self, seconds: float) -> None:
        """Add the seconds of a verdict to the average."""
        if self._mean is None:
            self._mean = seconds
        else:
            self._mean = (1 - SHARE) * self._mean + SHARE * seconds

    def workers(self, jobs: int) -> int:
        """Return the number of workers for a number of jobs: up to the cores, or more where those would have too
        much."""
        # Expected seconds of all jobs in units of WORTH.
        worth = int(jobs * (self._mean or 0.0) / WORTH)
        return max(-(-jobs // MOST), min(worth, jobs, cores()))


class Together:
    """The waiting jobs of any number of loops. `send(verifier, jobs)` returns the verdicts of each, or None."""

    def __init__(self, send: Callable[[Verifier, Sequence[VerifierJob]], Awaitable[Sequence[Found]]]) -> None:
        self._send = send
        self._waiting: dict[tuple[asyncio.AbstractEventLoop, int], list[tuple[VerifierJob, asyncio.Future[Found]]]] = {}
        """By loop, whose thread alone touches its entries, and verifier."""
        self._under_way: set[asyncio.Task[None]] = set()

    async def verdicts(self, verifier: Verifier, job: VerifierJob, batch_delay: float) -> Found:
        """The verdicts of a job that may wait `batch_delay` seconds for others; None when it has to be done alone."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.setdefault((loop, id(verifier)), [])
        future: asyncio.Future[Found] = loop.create_future()
        waiting.append((job, future))
        # `call_soon` and not a call: jobs of the same turn of the loop still join.
        if not batch_delay or len(waiting) == ENOUGH:
            loop.call_soon(self._go, loop, verifier)
        elif len(waiting) == 1:
            loop.call_later(batch_delay, self._go, loop, verifier)
        return await future

    def _go(self, loop: asyncio.AbstractEventLoop, verifier: Verifier) -> None:
        waiting = [one for one in self._waiting.pop((loop, id(verifier)), []) if not one[1].done()]
        # Those that were cancelled while they waited are left out.
        if waiting:
            task = loop.create_task(self._answer(verifier, waiting))
            # The loop keeps only weak references to tasks.
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _answer(self, verifier: Verifier, waiting: Sequence[tuple[VerifierJob, asyncio.Future[Found]]]) -> None:
        results: Sequence[Found] = [None] * len(waiting)
        try:
            results = await self._send(verifier, [job for job, _ in waiting])
        except Exception as error:
            log.debug("%d jobs are done alone: %r", len(waiting), error)
        finally:
            for (_, future), verdicts in zip(waiting, results, strict=True):
                if not future.done():
                    future.set_result(verdicts)
