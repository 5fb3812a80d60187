"""Jobs of a quick verifier that come at the same moment, given to few workers, several to each.

A job by itself costs a fifth of a millisecond on its way there and back. Where a verifier was quick lately, jobs that
arrive in one turn of the loop travel together. Invariant: whatever goes wrong with several, each is then done alone, under
its own limit, so that no answer pays for another's.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import TYPE_CHECKING

from rlvr.records import Verdict
from rlvr.verifiers.pool.threads import cores
from rlvr.verifiers.pool.wire import Job, Several

if TYPE_CHECKING:
    from rlvr.verifiers.pool.crews import Crew

QUICK = 0.002
"""Mean seconds for a verdict up to which a verifier is quick."""
SHARE = 0.1
"""What the newest verdict counts in that mean."""
MOST = 16
"""Jobs of one worker at a time."""
WORTH = 0.001
"""Seconds of work that are worth another worker."""
PATIENCE = 1.0
"""Seconds for several jobs, after which each is tried alone."""


class Together:
    """The jobs that wait for this turn of the loop to end."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self._waiting: list[tuple[Job, asyncio.Future[list[Verdict] | None]]] = []
        self._mean: float | None = None

    @property
    def quick(self) -> bool:
        """Whether the verifier was quick lately."""
        return self._mean is not None and self._mean <= QUICK

    def note(self, seconds: float) -> None:
        """A verdict took so long."""
        self._mean = seconds if self._mean is None else (1 - SHARE) * self._mean + SHARE * seconds

    async def verdicts(self, job: Job, limit: float, slots: asyncio.Semaphore) -> list[Verdict] | None:
        """The verdicts of a job that goes with others; None when it has to be done alone."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Verdict] | None] = loop.create_future()
        self._waiting.append((job, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._send, limit, slots)
        return await future

    def _send(self, limit: float, slots: asyncio.Semaphore) -> None:
        """Deal what waits to as many workers as it is worth, up to the cores, or more where those would have too much."""
        waiting, self._waiting = self._waiting, []
        worth = int(len(waiting) * (self._mean or 0.0) / WORTH)
        shares = max(-(-len(waiting) // MOST), min(worth, len(waiting), cores()))
        for number in range(shares):
            self.crew.crews.background.start(self._several(waiting[number::shares], limit, slots))

    async def _several(
        self,
        waiting: list[tuple[Job, asyncio.Future[list[Verdict] | None]]],
        limit: float,
        slots: asyncio.Semaphore,
    ) -> None:
        jobs, found = tuple(job for job, _ in waiting), None
        try:
            if len(jobs) > 1:
                async with slots:
                    start = time.perf_counter()
                    found = await self.crew.at_once(pickle.dumps(Several(jobs)), min(limit, PATIENCE), len(jobs))
                    self.note((time.perf_counter() - start) / len(jobs))
        except Exception:  # late, broken off, not to be sent: whose fault it is shows when each is done alone
            self.note(PATIENCE)
        finally:
            for i, (_, future) in enumerate(waiting):
                if not future.done():
                    future.set_result(None if found is None else [found[i]])
