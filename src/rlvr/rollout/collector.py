"""Collecting rollouts: plans run concurrently on an event loop in a thread of its own, and rollouts arrive one by one.

The thread makes collection work the same in a script, in a notebook whose loop is already running, and later while the
trainer updates. Invariants: what a plan raises is raised to whoever collects; an interrupted or failed collection leaves no
running plan behind; the order of the result is by draw and member, however they finished.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlvr.errors import WaitTimeout
from rlvr.records import Rollout
from rlvr.rollout.plans import Draw, Means, Plan
from rlvr.waits import take


class Interrupted(Exception):
    """The collection was given up because the run is to stop."""


@dataclass
class Timing:
    """Seconds of a collection: until the last completion was sampled, and what verification took beyond that."""

    sampling: float = 0.0
    verifying: float = 0.0


class Collector:
    """Runs plans. `close()` ends the thread."""

    def __init__(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        self.interrupted = interrupted
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="rlvr-collector", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(_cancelled(asyncio.all_tasks(self.loop)))  # what an engine left open, say

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the collector's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stream(
        self, draws: Sequence[Draw], plan: Plan, means: Means, deadline: float, timing: Timing | None = None
    ) -> Iterator[Rollout]:
        """Verified rollouts of all draws, in the order in which they finish.

        `deadline` is in seconds from now; WaitTimeout says how many groups were open when it passed. Raises Interrupted
        when the run is to stop, and what a plan raised.
        """
        arrived: queue.SimpleQueue[Rollout | BaseException | None] = queue.SimpleQueue()
        start = time.perf_counter()
        sampled_at = [start]

        async def generate(request: Any) -> Any:
            completion = await means.generate(request)
            sampled_at[0] = time.perf_counter()
            return completion

        timed = Means(**{**means.__dict__, "generate": generate})

        async def run(draw: Draw) -> None:
            try:
                async for rollout in plan(draw, timed):
                    arrived.put(rollout)
                arrived.put(None)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                arrived.put(error)

        async def start_all() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(run(draw)) for draw in draws]

        tasks = self.submit(start_all()).result(timeout=deadline)
        open_groups, until = len(draws), time.monotonic() + deadline
        try:
            while open_groups:
                item = take(arrived, f"rollouts ({open_groups} of {len(draws)} groups open)", until, self.interrupted)
                if isinstance(item, BaseException):
                    raise item
                if item is not None:
                    yield item
                elif self.interrupted():
                    raise Interrupted
                else:
                    open_groups -= 1
        finally:
            if open_groups:
                self.submit(_cancelled(tasks)).result(timeout=60)
        if timing is not None:
            timing.sampling = sampled_at[0] - start
            timing.verifying = time.perf_counter() - sampled_at[0]

    def collect(self, *arguments: Any, **options: Any) -> list[Rollout]:
        """All rollouts of `stream`, by draw and member."""
        return in_order(self.stream(*arguments, **options))

    def close(self) -> None:
        """Stop the loop and its thread; WaitTimeout when it does not end within 10 seconds."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            raise WaitTimeout("the collector's thread did not end within 10 s")
        self.loop.close()


def in_order(rollouts: Iterator[Rollout]) -> list[Rollout]:
    """Rollouts by draw, group and member. A plan names its groups `DRAW` or `DRAW/...` by the number of the draw."""
    return sorted(rollouts, key=lambda r: (int(r.group.partition("/")[0]), r.group, r.member))


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
