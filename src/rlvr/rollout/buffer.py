"""Groups of rollouts for the coming steps, sampled up to `staleness` steps ahead of the one that trains, and the event
loop that their plans run on.

The buffer is a first-in-first-out window: the groups of step s are drawn when step s - staleness begins, and trained in
step s, so the weights that sampled a token are at most `staleness` versions older than those that train on it, and
nothing is thrown away for its age. Staleness 0 is the synchronous run.

With `dynamic_sampling` a draw whose rewards are all the same is replaced by another draw, until the step has its number
of groups or has drawn `attempts` times as many. With `oversample` 1 no more draws are open than groups are missing, so
what a step trains on is the shortest run of draws that has enough useful groups, whatever finished first. Above 1 the
groups that were not needed go to the next step: the age of a token is then at most 2 x staleness + 1.

The loop has a thread of its own, so that collection works the same in a script, in a notebook whose loop is already
running, and while the trainer updates.

Invariants: a draw is trained once or requeued, never lost or trained twice; a requeued draw is drawn again first, with
the same seeds; the state names the draws that are under way, so a resumed run samples them again. An exception of a
plan is raised to the caller that waits; an interrupted or failed collection leaves no running plan behind; the order of
rollouts is by draw and member, however they finished.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from rlvr.components import Monitoring
from rlvr.config import RolloutConfig
from rlvr.core.waits import finished
from rlvr.data import Draw, Sampler
from rlvr.errors import WaitTimeoutError
from rlvr.records import Rollout
from rlvr.rollout.plans import Plan, RolloutContext

T = TypeVar("T")


class CollectionInterruptedError(Exception):
    """The collection was given up because the run is to stop."""


# Not the future of `asyncio.run_coroutine_threadsafe`: its `cancel` marks the future as cancelled at once, while the
# task may still run. Whoever cancels here has to know that no plan uses the engine any more, so `future` is settled by
# the task's own end alone.
class CollectionWork(Generic[T]):
    """A coroutine that runs on a collector's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.future: Future[T] = Future()
        self._loop = loop
        loop.call_soon_threadsafe(self._start, coroutine)

    def cancel(self, seconds: float = 60.0) -> None:
        """End the coroutine and wait until it has; WaitTimeoutError when it does not."""
        # The loop runs callbacks in the order in which they were added, so `_start` has set `_task` before this one
        # runs.
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())
        if wait_for([self.future], seconds).not_done:
            raise WaitTimeoutError(f"work on the collector's loop did not end within {seconds:g} s of being cancelled")

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[T]) -> None:
        # `task.exception()` would raise CancelledError for a cancelled task, hence the order of the two.
        error = CollectionInterruptedError() if task.cancelled() else task.exception()
        if error is None:
            self.future.set_result(task.result())
        else:
            self.future.set_exception(error)


class CollectionProgress:
    """The progress of a collection: its groups, and how many of them are open."""

    def __init__(self) -> None:
        self.groups = 0
        # `open` counts the groups whose plan runs. A plan that raises leaves its own counted: the collection ends then.
        self.open = 0
        self.scoring = 0
        """Complete groups whose rewards are being computed (dynamic sampling)."""

    def __str__(self) -> str:
        if self.scoring:
            scoring = f", the rewards of {self.scoring} being computed"
        else:
            scoring = ""
        return f"rollouts ({self.open} of {self.groups} groups open{scoring})"

    async def group(self, draw: Draw, plan: Plan, context: RolloutContext) -> list[Rollout]:
        """The rollouts of one draw."""
        self.groups += 1
        self.open += 1
        rollouts = [rollout async for rollout in plan(draw, context)]
        self.open -= 1
        return rollouts


class Collector:
    """The loop that plans run on. `close()` ends its thread."""

    def __init__(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        self.interrupted = interrupted
        self.loop = asyncio.new_event_loop()
        # A daemon: a plan that blocks the loop for ever must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._serve, name="rlvr-collector", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # After `stop`, tasks of engines (the driver of `hf`, say) are pending. Unless they are awaited, asyncio warns
        # of each when it is collected.
        self.loop.run_until_complete(cancelled(asyncio.all_tasks(self.loop)))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the collector's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> CollectionWork[T]:
        """Run a coroutine on the collector's loop, to be waited for or cancelled."""
        return CollectionWork(self.loop, coroutine)

    def wait(self, work: CollectionWork[T], what: object, deadline: float) -> T:
        """The result of `work`, within `deadline` seconds from now; otherwise it is cancelled.

        WaitTimeoutError says `what` was awaited. Raises CollectionInterruptedError when the run is to stop, and what
        the work raised.
        """
        done = False
        try:
            # Any way out but a finished future (an interrupt, the deadline, a lost rank that `Wait` raises for, Ctrl-C)
            # leaves plans that use the engine. They have to end before the caller goes on to publish or to save.
            done = finished(work.future, what, time.monotonic() + deadline, self.interrupted)
        finally:
            if not done:
                work.cancel()
        if not done:
            raise CollectionInterruptedError
        return work.future.result()

    def collect(self, draws: Sequence[Draw], plan: Plan, context: RolloutContext, deadline: float) -> list[Rollout]:
        """The rollouts of all draws, by draw and member; raises as `wait` does."""
        watch = CollectionProgress()

        async def everything() -> list[Rollout]:
            tasks = [asyncio.create_task(watch.group(draw, plan, context)) for draw in draws]
            try:
                # Awaiting in the order of completion raises the first failure at once, and `finally` ends the others.
                return in_order([rollout for done in asyncio.as_completed(tasks) for rollout in await done])
            finally:
                await cancelled(tasks)

        return self.wait(self.begin(everything()), watch, deadline)

    def close(self) -> None:
        """Stop the loop and its thread; WaitTimeoutError when it does not end within 10 seconds."""
        if not self._thread.is_alive():
            return
        # Order: stop the loop, join its thread, and only then close the loop. Closing a running loop raises.
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            raise WaitTimeoutError("the collector's thread did not end within 10 s")
        self.loop.close()


def in_order(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Rollouts by draw, group and member. A plan names its groups `DRAW` or `DRAW/...` by the number of the draw."""
    # The number first and as an int: as text `10` would come before `9`. The group's name is second, for plans that
    # make further groups (`3/1`, `3/2`) of one draw.
    return sorted(rollouts, key=lambda r: (int(r.group.partition("/")[0]), r.group, r.member))


async def cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """End all `tasks` and wait until they have."""
    for task in tasks:
        task.cancel()
    # Awaited, so that each task's own `finally` (an episode to close, a request to abort) has run on return.
    await asyncio.gather(*tasks, return_exceptions=True)


Group = tuple[Draw, list[Rollout]]


@dataclass
class StepRollouts:
    """The rollouts of a step."""

    rollouts: list[Rollout]
    """By draw and member."""
    dropped: list[Rollout] = field(default_factory=list)
    """Sampled and verified, but not trained: their group has no signal."""
    verifying: float = 0.0
    """Seconds of the wait in which only verdicts were missing."""
    ready: int | None = None
    """Groups of later steps that were complete when this one was taken; None where nothing is sampled."""
    step: int | None = None
    """The step of the stage, counted from 0: the ranks that did not collect learn it here."""
    monitored: list[tuple[Monitoring, list[Rollout]]] = field(default_factory=list)
    """Responses that rewards asked for and that are not trained."""
    further: StepRollouts | None = None
    """A further round for the step, whose rewards are not known yet (dynamic sampling by selection)."""
    columns: dict[str, np.ndarray] | None = None
    """The values that scoring gave to each of [*rollouts, *dropped], float64: set by the stage, or as recorded."""

    def metrics(self) -> dict[str, int | None]:
        """The metrics of the step."""
        return {"rollout/ready": self.ready, "rollout/dropped": None if self.ready is None else len(self.dropped)}


@dataclass
class _Batch:
    """The groups of one step, under way."""

    step: int
    wanted: int
    """Groups that are to train."""
    watch: CollectionProgress = field(default_factory=CollectionProgress)
    draws: list[Draw] = field(default_factory=list)
    """All draws made for the step."""
    sampled_at: float = math.inf
    """When its last completion was sampled, by time.perf_counter."""
    finished_at: float = math.inf
    work: CollectionWork[tuple[list[Group], list[Group]]] | None = None


class RolloutBuffer:
    """Gives the groups of one step after the other. `contexts(step)` makes what the plan works with in that step;
    `has_signal` says whether the rewards of a draw differ, and is awaited for one draw at a time."""

    def __init__(
        self,
        sampler: Sampler,
        collector: Collector,
        plan: Plan,
        contexts: Callable[[int], RolloutContext],
        config: RolloutConfig,
        last: int,
        has_signal: Callable[[list[Rollout]], Awaitable[bool]],
    ) -> None:
        self.sampler = sampler
        self.collector = collector
        self.plan = plan
        self.contexts = contexts
        self.config = config
        self.last = last
        self.has_signal = has_signal
        self._dynamic = config.dynamic_sampling
        if self._dynamic is not None and self._dynamic.by == "selection":
            # The stage finds out what is to be replaced, and asks for it by `more`.
            self._dynamic = None
        self._lock = threading.Lock()
        """Held for what both the trainer's thread and the collector's touch: the sampler and the lists below."""
        # Made in the trainer's thread and used on the collector's loop: since Python 3.10 a lock belongs to the loop
        # that first waits for it.
        self._scoring = asyncio.Lock()
        # Where a draw can be (each in exactly one of them, which makes "never lost, never trained twice"):
        #   _requeued      to be made again, before the sampler is asked
        #   _surplus       complete, but not needed by the step that drew it (oversample above 1)
        #   _prefetched    under way, or complete and waiting for its step
        #   _taken         handed to the trainer, not yet known to be trained
        self._requeued: deque[Draw] = deque()
        self._surplus: list[Group] = []
        self._prefetched: deque[_Batch] = deque()
        self._taken: list[Draw] = []

    def next(self, step: int) -> StepRollouts:
        """The groups of `step`, after those of the steps behind it were started.

        Raises WaitTimeoutError, CollectionInterruptedError, and what a plan raised; `roll_back` then makes the draws
        available again.
        """
        # Asking for the next step says that the one before was trained: a failed step is rolled back instead.
        self._taken = []
        # Each step begins the one `staleness` later; at the first call all of the window is begun. None is begun past
        # the last step of the stage, so that no sampling is thrown away at its end.
        if self._prefetched:
            begun = self._prefetched[-1].step + 1
        else:
            begun = step
        for number in range(begun, min(step + self.config.staleness, self.last - 1) + 1):
            self._prefetched.append(self._begin(number, self.config.prompts_per_step))
        return self._wait(step)

    def more(self, step: int, count: int) -> StepRollouts:
        """`count` further groups for the step that was taken last; raises as `next`. Nothing may be sampled ahead."""
        assert not self._prefetched, "groups of later steps are under way"
        self._prefetched.append(self._begin(step, count))
        return self._wait(step)

    def _wait(self, step: int) -> StepRollouts:
        """The groups of the oldest batch, which is of `step`."""
        batch = self._prefetched[0]
        start = time.perf_counter()
        assert batch.work is not None and batch.step == step, f"step {step} is asked for, step {batch.step} is due"
        kept, dropped = self.collector.wait(batch.work, batch.watch, self.config.deadline)
        self._prefetched.popleft()
        with self._lock:
            # From here on a `roll_back` gives them back; until here `_prefetched` did.
            self._taken = [*self._taken, *batch.draws]
            ready = sum(b.watch.groups - b.watch.open for b in self._prefetched) + len(self._surplus)
        # verifying = min(waited, finished_at - sampled_at): seconds of this wait in which nothing was sampled for the
        # step. At most the wait itself: with staleness a batch may have been complete before it was waited for.
        waited = time.perf_counter() - start
        verifying = min(waited, max(0.0, batch.finished_at - batch.sampled_at))
        return StepRollouts(_rollouts(kept), _rollouts(dropped), verifying, ready)

    def roll_back(self) -> None:
        """End what is under way; its draws, and those of the step last taken, are the next to be drawn."""
        # Outside the lock: the coroutine takes it in `_draw` and `_take_surplus` before it sees the cancellation, and
        # would wait for a thread that waits for it.
        for batch in self._prefetched:
            assert batch.work is not None
            if not batch.work.future.done():
                batch.work.cancel()
        with self._lock:
            # Complete groups of later steps are sampled again as well: a saved state names draws, not rollouts, so a
            # run that goes on in this process and one that resumes from a checkpoint do the same.
            self._requeued = deque(self._untrained(self._taken))
            self._prefetched.clear()
            self._surplus = []
            self._taken = []

    def state_dict(self) -> dict[str, Any]:
        """The sampler, and the draws that later steps have to train."""
        with self._lock:
            # One lock for both: a draw that the collector takes from the sampler between the two would be in neither or
            # in both. `_taken` is left out, since a checkpoint is made after its step has trained. The key `owed` is
            # that of the first version of the format.
            untrained = [[draw.number, draw.task.id] for draw in self._untrained()]
            return {"sampler": self.sampler.state_dict(), "owed": untrained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; nothing may be under way."""
        self.sampler.load_state_dict(state["sampler"])
        self._requeued = deque(Draw(number, self.sampler.pool[task]) for number, task in state["owed"])

    def _untrained(self, more: Iterable[Draw] = ()) -> list[Draw]:
        """Draws that were taken from the sampler and not trained, by number."""
        drawn = [
            *more,
            *self._requeued,
            *(draw for draw, _ in self._surplus),
            *(d for b in self._prefetched for d in b.draws),
        ]
        return sorted(drawn, key=lambda draw: draw.number)

    def _begin(self, step: int, wanted: int) -> _Batch:
        batch = _Batch(step, wanted)
        batch.work = self.collector.begin(self._sample(batch))
        return batch

    async def _sample(self, batch: _Batch) -> tuple[list[Group], list[Group]]:
        """(groups that train, groups that were dropped) of one step."""
        context = self.contexts(batch.step)
        wanted = batch.wanted
        most = wanted
        oversample = 1.0
        if self._dynamic is not None:
            most = wanted * self._dynamic.attempts
            oversample = self._dynamic.oversample
        kept: list[Group] = []
        dropped: list[Group] = []
        running: dict[asyncio.Task[tuple[list[Rollout], bool]], Draw] = {}
        try:
            drawn = 0
            # The invariant of oversample 1 is len(kept) + len(running) <= wanted: a draw is only made once one before
            # it has turned out useless. What trains is then a function of the order of draws alone, and not of which
            # plan finished first.
            while len(kept) < wanted:
                # Asked for in every round: with staleness a step that runs beside this one may set groups aside at any
                # time.
                kept += self._take_surplus(batch, wanted - len(kept))
                if len(kept) == wanted:
                    break
                # `drawn` counts fresh and requeued draws, not surplus, which was counted by the step that drew it.
                missing = math.ceil((wanted - len(kept)) * oversample) - len(running)
                draws = self._draw(batch, max(0, min(missing, most - drawn)))
                drawn += len(draws)
                for draw in draws:
                    running[asyncio.create_task(self._sample_draw(batch, draw, context))] = draw
                # The attempts are used up and nothing is open.
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                # Several may be done at one wake-up, as a set: sorted, so that `kept[wanted:]` does not depend on the
                # order of a set.
                for task in sorted(done, key=lambda task: running[task].number):
                    draw = running.pop(task)
                    # Raises what the plan or the reward function raised; the `finally` then ends the other draws.
                    rollouts, useful = task.result()
                    (kept if useful else dropped).append((draw, rollouts))
        finally:
            await cancelled(running)
        dropped.sort(key=lambda group: group[0].number)
        # The attempts are used up: groups without a signal fill the step to its usual size, the oldest draws first,
        # whatever finished first.
        while len(kept) < wanted and dropped:
            kept.append(dropped.pop(0))
        # `running` still names the draws whose tasks the `finally` cancelled (above 1 slow ones are cut off).
        self._set_aside(batch, kept[wanted:], list(running.values()))
        batch.sampled_at = context.sampled_at
        batch.finished_at = time.perf_counter()
        return kept[:wanted], dropped

    async def _sample_draw(self, batch: _Batch, draw: Draw, context: RolloutContext) -> tuple[list[Rollout], bool]:
        """Sample one draw and, under dynamic sampling, find out whether it trains."""
        rollouts = in_order(await batch.watch.group(draw, self.plan, context))
        if self._dynamic is None:
            return rollouts, True
        # One draw at a time: reward functions need not be safe to call from two threads at once.
        batch.watch.scoring += 1
        async with self._scoring:
            useful = await self.has_signal(rollouts)
        batch.watch.scoring -= 1
        return rollouts, useful

    def _draw(self, batch: _Batch, count: int) -> list[Draw]:
        with self._lock:
            # Requeued draws come first, with the numbers that they had: seeds derive from the number, so a resumed run
            # samples the same tokens under the same weights.
            again = [self._requeued.popleft() for _ in range(min(count, len(self._requeued)))]
            if count > len(again):
                again += self.sampler.next(count - len(again))
            batch.draws += again
            return again

    def _take_surplus(self, batch: _Batch, count: int) -> list[Group]:
        """At most `count` of the groups that earlier steps left; one that would be too old is sampled again."""
        # Bound of the age of a token with oversample above 1: its own step was sampled up to `staleness` versions
        # early, and it may wait for a later step; 2 x staleness + 1 in all (docs/rollouts.md, Sampling ahead). Groups
        # past that are drawn again.
        oldest = batch.step - 2 * self.config.staleness - 1
        with self._lock:
            self._requeued.extend(draw for draw, rollouts in self._surplus if _oldest_version(rollouts) < oldest)
            self._surplus = [group for group in self._surplus if _oldest_version(group[1]) >= oldest]
            taken = self._surplus[:count]
            self._surplus = self._surplus[count:]
            batch.draws += [draw for draw, _ in taken]
            return taken

    def _set_aside(self, batch: _Batch, surplus: list[Group], unfinished: list[Draw]) -> None:
        """Keep surplus of the step: complete groups for the next one, and draws to be made again."""
        with self._lock:
            # `batch.draws` names what the step trains or drops; draws that are set aside must not also be rolled back
            # by `roll_back`.
            rest = {draw.number for draw, _ in surplus} | {draw.number for draw in unfinished}
            batch.draws = [draw for draw in batch.draws if draw.number not in rest]
            self._surplus += surplus
            self._requeued.extend(sorted(unfinished, key=lambda draw: draw.number))


def _oldest_version(rollouts: list[Rollout]) -> float:
    """The oldest version of the weights that sampled a token; infinite where none was sampled."""
    # The version is -1 where nothing was sampled, which would pass for the oldest of all.
    versions = [rollout.policy_version[rollout.sampled] for rollout in rollouts]
    return min(np.concatenate(versions), default=math.inf)


def _rollouts(groups: Iterable[Group]) -> list[Rollout]:
    return in_order(rollout for _, rollouts in groups for rollout in rollouts)
