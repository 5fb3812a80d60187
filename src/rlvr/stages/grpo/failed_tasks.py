"""Steps of a grpo stage that learn the demonstrations of tasks at which whole groups failed (ReLIFT)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.config import SupervisedStepsConfig
from rlvr.data import Sampler
from rlvr.records import Batch, Group, Task

log = logging.getLogger(__name__)


class FailedTasks:
    """Gathers tasks whose groups failed. Once `gather` of them are there the next step learns their demonstrations,
    those that were gathered last before the others.

    Invariant: a task waits once for each failed group, whatever the number of times that its step was collected.
    """

    def __init__(self, config: SupervisedStepsConfig, tasks: Sequence[Task]) -> None:
        assert config.gather is not None, "tasks that failed are gathered where `gather` is set"
        self._gather = config.gather
        self._failed = config.failed
        self._warned = False
        """True if rewards and verdicts were found to disagree on a group, for one warning."""
        self._tasks = {task.id: task for task in tasks if task.demonstration}
        self._waiting: list[str] = []
        """Ids, those of the last step first."""
        self._before: list[str] = []
        """The same when the step last collected began."""
        self._learned = 0
        """Tasks that were learned so far; keeps the names of their groups apart."""

    def drawn(self, step: int) -> bool:
        """True where the next step learns demonstrations."""
        self._before = list(self._waiting)
        return len(self._waiting) >= self._gather

    def take(self, sampler: Sampler, count: int) -> list[tuple[str, Task]]:
        """The tasks to learn, each with the key of its group."""
        ids = self._waiting[: self._gather]
        del self._waiting[: self._gather]
        self._learned += len(ids)
        return [(f"failed-{self._learned - n}", self._tasks[id]) for n, id in enumerate(ids)]

    def look(self, batch: Batch) -> None:
        """Gather from a scored step the tasks that have a demonstration and no response with a reward above `failed`.
        Warn once where rewards and verdicts disagree on which groups failed."""
        reward = batch.column("reward")
        ids = []
        for group in batch.groups():
            # An undecided reward is NaN, and the group has not failed.
            rewards = reward[group.index]
            failed = bool((rewards <= self._failed).all())
            self._compare_with_verdicts(group, failed, float(rewards.max()))
            if failed:
                ids.append(group.rollouts[0].task.id)
        self._waiting = [id for id in ids if id in self._tasks] + self._waiting

    def _compare_with_verdicts(self, group: Group, failed: bool, largest: float) -> None:
        scores = [rollout.verdict.score for rollout in group.rollouts if rollout.verdict is not None]
        known = [score for score in scores if score is not None]
        if self._warned or len(known) < len(group.rollouts) or math.isnan(largest):
            return
        if not failed and not any(known):
            found = f"every verdict is 0 and the largest reward is {largest:g}, so that it is not gathered"
            advice = f"set it to {largest:g} where this is the reward of a wrong response"
        elif failed and 1.0 in known:
            found = f"a verdict is 1 and no reward is above {self._failed:g}, so that it is gathered as failed"
            advice = "set it below the reward of a right response"
        else:
            return
        self._warned = True
        log.warning(
            "algorithm.supervised_steps.failed is %g: of the group of %s %s; %s (reported once)",
            *(self._failed, group.rollouts[0].task.named, found, advice),
        )

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in nothing: only rewards decide."""

    def roll_back(self) -> None:
        """Forget the step last collected."""
        self._waiting = list(self._before)

    def state_dict(self) -> dict[str, Any]:
        """The tasks that wait."""
        return {"waiting": list(self._waiting), "learned": self._learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the tasks of a checkpoint that are still there."""
        self._waiting = [id for id in state["waiting"] if id in self._tasks]
        self._learned = state["learned"]
