"""Collecting rollouts: plans run concurrently on an event loop in a thread of its own.

The thread makes collection work the same in a script, in a notebook whose loop is already running, and while the trainer
updates. Invariants: what a plan raises is raised to whoever waits; an interrupted or failed collection leaves no running
plan behind; the order of rollouts is by draw and member, however they finished.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Generic, TypeVar

from rlvr.core.waits import finished
from rlvr.errors import WaitTimeout
from rlvr.records import Rollout
from rlvr.rollout.plans import Draw, Means, Plan

T = TypeVar("T")


class Interrupted(Exception):
    """The collection was given up because the run is to stop."""


class Work(Generic[T]):
    """A coroutine that runs on a collector's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.future: Future[T] = Future()
        self._loop = loop
        loop.call_soon_threadsafe(self._start, coroutine)

    def cancel(self, seconds: float = 60.0) -> None:
        """End the coroutine and wait until it has; WaitTimeout when it does not."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())
        if wait_for([self.future], seconds).not_done:
            raise WaitTimeout(f"work on the collector's loop did not end within {seconds:g} s of being cancelled")

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[T]) -> None:
        error = Interrupted() if task.cancelled() else task.exception()
        if error is None:
            self.future.set_result(task.result())
        else:
            self.future.set_exception(error)


class Watch:
    """What a collection is doing: its open groups, and when the last completion was sampled."""

    def __init__(self) -> None:
        self.groups, self.open = 0, 0
        self.scoring = 0
        """Complete groups whose rewards are being computed (dynamic sampling)."""
        self.sampled_at = time.perf_counter()

    def __str__(self) -> str:
        scoring = f", the rewards of {self.scoring} being computed" if self.scoring else ""
        return f"rollouts ({self.open} of {self.groups} groups open{scoring})"

    async def group(self, draw: Draw, plan: Plan, means: Means) -> list[Rollout]:
        """The rollouts of one draw."""

        async def generate(request: Any) -> Any:
            completion = await means.generate(request)
            self.sampled_at = time.perf_counter()
            return completion

        self.groups, self.open = self.groups + 1, self.open + 1
        watched = dataclasses.replace(means, generate=generate)
        rollouts = [rollout async for rollout in plan(draw, watched)]
        self.open -= 1
        return rollouts


class Collector:
    """The loop that plans run on. `close()` ends its thread."""

    def __init__(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        self.interrupted = interrupted
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="rlvr-collector", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(cancelled(asyncio.all_tasks(self.loop)))  # what an engine left open, say

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the collector's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Work[T]:
        """Run a coroutine on the collector's loop, to be waited for or cancelled."""
        return Work(self.loop, coroutine)

    def wait(self, work: Work[T], what: object, deadline: float) -> T:
        """The result of `work`, within `deadline` seconds from now; otherwise it is cancelled.

        WaitTimeout says `what` was awaited. Raises Interrupted when the run is to stop, and what the work raised.
        """
        done = False
        try:
            done = finished(work.future, what, time.monotonic() + deadline, self.interrupted)
        finally:
            if not done:
                work.cancel()
        if not done:
            raise Interrupted
        return work.future.result()

    def collect(self, draws: Sequence[Draw], plan: Plan, means: Means, deadline: float) -> list[Rollout]:
        """The rollouts of all draws, by draw and member; raises as `wait` does."""
        watch = Watch()

        async def everything() -> list[Rollout]:
            tasks = [asyncio.create_task(watch.group(draw, plan, means)) for draw in draws]
            try:
                return in_order([rollout for done in asyncio.as_completed(tasks) for rollout in await done])
            finally:
                await cancelled(tasks)

        return self.wait(self.begin(everything()), watch, deadline)

    def close(self) -> None:
        """Stop the loop and its thread; WaitTimeout when it does not end within 10 seconds."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            raise WaitTimeout("the collector's thread did not end within 10 s")
        self.loop.close()


def in_order(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Rollouts by draw, group and member. A plan names its groups `DRAW` or `DRAW/...` by the number of the draw."""
    return sorted(rollouts, key=lambda r: (int(r.group.partition("/")[0]), r.group, r.member))


async def cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """End all `tasks` and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
