"""Per-prompt history: how often a task was attempted, how it went, and the best answer so far.

Invariants: undecided attempts count as attempts and change nothing else; a task that was never attempted has the empty
record; the state is JSON types, one short list per task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.records import BASELINE, Rollout


@dataclass(frozen=True)
class TaskHistory:
    """What happened to one task so far."""

    attempts: int = 0
    """Rollouts verified."""
    decided: int = 0
    """Of these, how many got a score."""
    total: float = 0.0
    """The sum of the scores."""
    last_pass_rate: float | None = None
    """The pass rate of the last group that had a decided score."""
    best_score: float | None = None
    best_answer: str | None = None
    """The completion that got the best score first, cut to the history's `answer_limit`."""

    @property
    def pass_rate(self) -> float | None:
        """The mean of all decided scores (with scores of 0 and 1 the share that is correct); None before the first."""
        return self.total / self.decided if self.decided else None


class History:
    """The history of every task, by id. Answers are kept up to `answer_limit` characters."""

    def __init__(self, answer_limit: int = 2000) -> None:
        self.answer_limit = answer_limit
        self._tasks: dict[str, TaskHistory] = {}

    def __getitem__(self, task_id: str) -> TaskHistory:
        return self._tasks.get(task_id, TaskHistory())

    def __len__(self) -> int:
        """How many tasks were attempted."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def record(self, task_id: str, scores: Sequence[float | None], answers: Sequence[str] | None = None) -> None:
        """Add one group: a score per rollout (None or NaN: undecided) and, if given, the text of each."""
        if answers is not None and len(answers) != len(scores):
            raise ValueError(f"task {task_id}: {len(scores)} scores but {len(answers)} answers")
        old = self[task_id]
        decided = [(float(s), i) for i, s in enumerate(scores) if s is not None and math.isfinite(s)]
        best_score, best_answer = old.best_score, old.best_answer
        for score, index in decided:
            if best_score is None or score > best_score:
                best_score = score
                best_answer = answers[index][: self.answer_limit] if answers is not None else None
        total = sum(score for score, _ in decided)
        self._tasks[task_id] = TaskHistory(
            attempts=old.attempts + len(scores),
            decided=old.decided + len(decided),
            total=old.total + total,
            last_pass_rate=total / len(decided) if decided else old.last_pass_rate,
            best_score=best_score,
            best_answer=best_answer,
        )

    def record_rollouts(self, rollouts: Iterable[Rollout]) -> None:
        """Add the verdicts of each group among the rollouts; those that are only a baseline are no attempts."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            if rollout.verdict is not None and rollout.role != BASELINE:
                groups.setdefault(rollout.group, []).append(rollout)
        for members in groups.values():
            scores = [r.verdict.score if r.verdict else None for r in members]
            self.record(members[0].task.id, scores, [r.text for r in members])

    def state_dict(self) -> dict[str, Any]:
        return {"tasks": {task_id: list(vars(task).values()) for task_id, task in self._tasks.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tasks = {task_id: TaskHistory(*values) for task_id, values in state["tasks"].items()}
