"""Steps of a grpo stage that learn the demonstrations of tasks at which whole groups failed (ReLIFT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.data import Sampler
from rlvr.records import Batch, Task


class FailedTasks:
    """Gathers tasks whose groups failed. Once `gather` of them are there the next step learns their demonstrations,
    those that were gathered last before the others.

    Invariant: a task waits once for each failed group, whatever the number of times that its step was collected.
    """

    def __init__(self, gather: int, tasks: Sequence[Task]) -> None:
        self._gather = gather
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
        """Gather from a scored step the tasks that have a demonstration and no response with a reward other than 0."""
        reward = batch.column("reward")
        ids = [group.rollouts[0].task.id for group in batch.groups() if not reward[group.index].any()]
        self._waiting = [id for id in ids if id in self._tasks] + self._waiting

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
