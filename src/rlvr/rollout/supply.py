"""The supply of rollouts: groups for the coming steps, sampled up to `staleness` steps ahead of the one that trains.

A first-in-first-out window: the groups of step s are drawn when step s - staleness begins, and trained in step s, so the
weights that sampled a token are at most `staleness` versions older than those that train on it, and nothing is thrown
away for its age. Staleness 0 is the synchronous run.

With `refill` a draw whose rewards are all the same is replaced by another draw, until the step has its number of groups or
has drawn `attempts` times as many. With `oversample` 1 no more draws are open than groups are missing, so what a step
trains on is the shortest run of draws that has enough useful groups, whatever finished first. Above 1 the groups that
were not needed go to the next step: the age of a token is then at most 2 x staleness + 1.

Invariants: a draw is trained once or given back, never lost or trained twice; what is given back is drawn again first, with
the same seeds; the state names the draws that are under way, so a resumed run samples them again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvr.config import RolloutConfig
from rlvr.data import Draw, Sampler
from rlvr.records import Rollout
from rlvr.rollout.collector import Collector, Watch, Work, cancelled, in_order
from rlvr.rollout.plans import Means, Plan

Group = tuple[Draw, list[Rollout]]


@dataclass
class Collected:
    """What a step got."""

    rollouts: list[Rollout]
    """By draw and member."""
    dropped: list[Rollout] = field(default_factory=list)
    """Sampled and verified, but not trained: their group would have taught nothing."""
    verifying: float = 0.0
    """Seconds of the wait in which only verdicts were missing."""
    ready: int | None = None
    """Groups of later steps that were complete when this one was taken; None where nothing is sampled."""
    columns: dict[str, np.ndarray] | None = None
    """What scoring gave to each of [*rollouts, *dropped], float64: set by the stage, or as it was recorded."""

    def metrics(self) -> dict[str, int | None]:
        """As a step's record has it."""
        return {"rollout/ready": self.ready, "rollout/dropped": None if self.ready is None else len(self.dropped)}


@dataclass
class _Batch:
    """The groups of one step, under way."""

    step: int
    watch: Watch = field(default_factory=Watch)
    draws: list[Draw] = field(default_factory=list)
    """Everything drawn for it."""
    finished_at: float = math.inf
    work: Work[tuple[list[Group], list[Group]]] | None = None


class Supply:
    """Gives the groups of one step after the other. `means(step)` is what the plan works with in that step; `teaches` says
    whether the rewards of a draw differ, and is awaited for one draw at a time."""

    def __init__(
        self,
        sampler: Sampler,
        collector: Collector,
        plan: Plan,
        means: Callable[[int], Means],
        config: RolloutConfig,
        last: int,
        teaches: Callable[[list[Rollout]], Awaitable[bool]],
    ) -> None:
        self.sampler, self.collector, self.plan, self.means = sampler, collector, plan, means
        self.config, self.last, self.teaches = config, last, teaches
        self._lock = threading.Lock()
        """Held for what both the trainer's thread and the collector's touch: the sampler and the lists below."""
        self._scoring = asyncio.Lock()
        self._owed: deque[Draw] = deque()
        self._spare: list[Group] = []
        self._ahead: deque[_Batch] = deque()
        self._taken: list[Draw] = []

    def next(self, step: int) -> Collected:
        """The groups of `step`, after those of the steps behind it were started.

        Raises WaitTimeout, Interrupted, and what a plan raised; `give_back` then makes the draws available again.
        """
        self._taken = []  # those of the step before were trained
        begun = self._ahead[-1].step + 1 if self._ahead else step
        for number in range(begun, min(step + self.config.staleness, self.last - 1) + 1):
            self._ahead.append(self._begin(number))
        batch, start = self._ahead[0], time.perf_counter()
        assert batch.work is not None and batch.step == step, f"step {step} is asked for, step {batch.step} is due"
        kept, dropped = self.collector.wait(batch.work, batch.watch, self.config.deadline)
        self._ahead.popleft()
        with self._lock:
            self._taken = batch.draws
            ready = sum(b.watch.groups - b.watch.open for b in self._ahead) + len(self._spare)
        waited = time.perf_counter() - start
        verifying = min(waited, max(0.0, batch.finished_at - batch.watch.sampled_at))
        return Collected(_rollouts(kept), _rollouts(dropped), verifying, ready)

    def give_back(self) -> None:
        """End what is under way; its draws, and those of the step last taken, are the next to be drawn."""
        for batch in self._ahead:
            assert batch.work is not None
            if not batch.work.future.done():
                batch.work.cancel()
        with self._lock:
            self._owed = deque(self._untrained(self._taken))
            self._ahead.clear()
            self._spare, self._taken = [], []

    def state_dict(self) -> dict[str, Any]:
        """The sampler, and the draws that are owed to later steps."""
        with self._lock:
            owed = [[draw.number, draw.task.id] for draw in self._untrained()]
            return {"sampler": self.sampler.state_dict(), "owed": owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken; nothing may be under way."""
        self.sampler.load_state_dict(state["sampler"])
        self._owed = deque(Draw(number, self.sampler.pool[task]) for number, task in state["owed"])

    def _untrained(self, more: Iterable[Draw] = ()) -> list[Draw]:
        """Draws that were taken from the sampler and not trained, by number."""
        drawn = [*more, *self._owed, *(draw for draw, _ in self._spare), *(d for b in self._ahead for d in b.draws)]
        return sorted(drawn, key=lambda draw: draw.number)

    def _begin(self, step: int) -> _Batch:
        batch = _Batch(step)
        batch.work = self.collector.begin(self._sample(batch))
        return batch

    async def _sample(self, batch: _Batch) -> tuple[list[Group], list[Group]]:
        """(groups that train, groups that were dropped) of one step."""
        refill, means = self.config.refill, self.means(batch.step)
        wanted = self.config.prompts_per_step
        most, oversample = (wanted * refill.attempts, refill.oversample) if refill else (wanted, 1.0)
        kept: list[Group] = []
        dropped: list[Group] = []
        running: dict[asyncio.Task[tuple[list[Rollout], bool]], Draw] = {}
        try:
            drawn = 0
            while len(kept) < wanted:
                kept += self._take_spare(batch, wanted - len(kept))
                if len(kept) == wanted:
                    break
                missing = math.ceil((wanted - len(kept)) * oversample) - len(running)
                draws = self._draw(batch, max(0, min(missing, most - drawn)))
                drawn += len(draws)
                for draw in draws:
                    running[asyncio.create_task(self._sample_draw(batch, draw, means))] = draw
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: running[task].number):
                    draw = running.pop(task)
                    rollouts, useful = task.result()
                    (kept if useful else dropped).append((draw, rollouts))
        finally:
            await cancelled(running)
        dropped.sort(key=lambda group: group[0].number)
        while (
            len(kept) < wanted and dropped
        ):  # the attempts are used up: the step is as large as ever, with what there is
            kept.append(dropped.pop(0))
        self._set_aside(batch, kept[wanted:], list(running.values()))
        batch.finished_at = time.perf_counter()
        return kept[:wanted], dropped

    async def _sample_draw(self, batch: _Batch, draw: Draw, means: Means) -> tuple[list[Rollout], bool]:
        """Sample one draw and, under dynamic sampling, find out whether it trains."""
        rollouts = in_order(await batch.watch.group(draw, self.plan, means))
        if self.config.refill is None:
            return rollouts, True
        # One draw at a time: reward functions need not be safe to call from two threads at once.
        batch.watch.scoring += 1
        async with self._scoring:
            useful = await self.teaches(rollouts)
        batch.watch.scoring -= 1
        return rollouts, useful

    def _draw(self, batch: _Batch, count: int) -> list[Draw]:
        with self._lock:
            owed = [self._owed.popleft() for _ in range(min(count, len(self._owed)))]
            fresh = self.sampler.next(count - len(owed)) if count > len(owed) else []
            batch.draws += [*owed, *fresh]
            return [*owed, *fresh]

    def _take_spare(self, batch: _Batch, count: int) -> list[Group]:
        """At most `count` of the groups that earlier steps left; one that would be too old is sampled again."""
        oldest = batch.step - 2 * self.config.staleness - 1
        with self._lock:
            self._owed.extend(draw for draw, rollouts in self._spare if _oldest_version(rollouts) < oldest)
            self._spare = [group for group in self._spare if _oldest_version(group[1]) >= oldest]
            taken, self._spare = self._spare[:count], self._spare[count:]
            batch.draws += [draw for draw, _ in taken]
            return taken

    def _set_aside(self, batch: _Batch, spare: list[Group], unfinished: list[Draw]) -> None:
        """What the step did not need: complete groups for the next one, and draws to be made again."""
        with self._lock:
            rest = {draw.number for draw, _ in spare} | {draw.number for draw in unfinished}
            batch.draws = [draw for draw in batch.draws if draw.number not in rest]
            self._spare += spare
            self._owed.extend(sorted(unfinished, key=lambda draw: draw.number))


def _oldest_version(rollouts: list[Rollout]) -> float:
    """Of the weights that sampled a token; infinite where none was sampled."""
    versions = [rollout.policy_version[rollout.sampled] for rollout in rollouts]
    return min(np.concatenate(versions), default=math.inf)


def _rollouts(groups: Iterable[Group]) -> list[Rollout]:
    return in_order(rollout for _, rollouts in groups for rollout in rollouts)
