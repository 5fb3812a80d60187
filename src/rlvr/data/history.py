"""Per-prompt history: how often a task was attempted, how it went, and the best answer where a component reads it.

Invariants: undecided attempts count as attempts and change nothing else; a task that was never attempted has the empty
record; memory is a few numbers per attempted task, and text only where a sampler or plan declares that it reads it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.records import BASELINE, Rollout

# q: int64, d: float64. Arrays, since a million objects of Python take some 300 MB.
_COLUMNS = {"attempts": "q", "decided": "q", "total": "d", "last_pass_rate": "d", "best_score": "d"}
"""Columns of numbers, with a row for each attempted task, and their types."""


@dataclass(frozen=True)
class TaskHistory:
    """Results of one task so far."""

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
    """The completion that got the best score first, cut to the history's `answer_limit`; None where that is 0."""

    @property
    def pass_rate(self) -> float | None:
        """The mean of all decided scores (with scores of 0 and 1 the share that is correct); None before the first."""
        if self.decided:
            return self.total / self.decided
        return None


class History:
    """The history of every attempted task, by id. Best answers are kept up to `answer_limit` characters; 0: not at
    all."""

    def __init__(self, answer_limit: int = 0) -> None:
        self.answer_limit = answer_limit
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[str, int] = {}
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in _COLUMNS.items()}
        self._answers: dict[str, str] = {}

    def keep_answers(self, characters: int) -> None:
        """Keep best answers from now on, up to so many characters, or more where more was asked for before."""
        self.answer_limit = max(self.answer_limit, characters)

    def __getitem__(self, task_id: str) -> TaskHistory:
        row = self._rows.get(task_id)
        if row is None:
            return TaskHistory()
        values: dict[str, Any] = {name: column[row] for name, column in self._columns.items()}
        if not values["decided"]:
            values |= {"last_pass_rate": None, "best_score": None}
        return TaskHistory(**values, best_answer=self._answers.get(task_id))

    def __len__(self) -> int:
        """Return the number of tasks that were attempted."""
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def record(self, task_id: str, scores: Sequence[float | None], answers: Sequence[str] | None = None) -> None:
        """Add one group: a score per rollout (None or NaN: undecided) and, if given, the text of each."""
        if answers is not None and len(answers) != len(scores):
            raise ValueError(f"task {task_id}: {len(scores)} scores but {len(answers)} answers")
        row = self._row(task_id)
        columns = self._columns
        columns["attempts"][row] += len(scores)
        decided = [(float(s), i) for i, s in enumerate(scores) if s is not None and math.isfinite(s)]
        if not decided:
            return
        best, index = max(decided, key=lambda scored: scored[0])  # of equals the first
        # Strictly better, so that the first of equal answers stays. Before the first decided score the column holds
        # 0.0, which means nothing.
        if not columns["decided"][row] or best > columns["best_score"][row]:
            columns["best_score"][row] = best
            # The old answer does not belong to the new score, also where answers are not kept any more.
            self._answers.pop(task_id, None)
            if answers is not None and self.answer_limit:
                self._answers[task_id] = answers[index][: self.answer_limit]
        total = sum(score for score, _ in decided)
        columns["decided"][row] += len(decided)
        columns["total"][row] += total
        columns["last_pass_rate"][row] = total / len(decided)

    def _row(self, task_id: str) -> int:
        """The row of a task, which is made when it is first attempted."""
        if task_id not in self._rows:
            for column in self._columns.values():
                column.append(0)
            self._rows[task_id] = len(self._rows)  # last: plans look rows up from another thread
        return self._rows[task_id]

    def record_rollouts(self, rollouts: Iterable[Rollout]) -> None:
        """Add the verdicts of each group among the rollouts; those that are only a baseline are no attempts."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            # A rollout without a verdict was not verified, and so is no attempt either.
            if rollout.verdict is not None and rollout.role != BASELINE:
                groups.setdefault(rollout.group, []).append(rollout)
        for members in groups.values():
            scores = [r.verdict.score if r.verdict else None for r in members]
            self.record(members[0].task.id, scores, [r.text for r in members])

    def state_dict(self) -> dict[str, Any]:
        """JSON types: a column of numbers each, in the order of `tasks`."""
        return {
            "tasks": list(self._rows),
            **{name: column.tolist() for name, column in self._columns.items()},
            "answers": dict(self._answers),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clear()
        self._rows = {task_id: row for row, task_id in enumerate(state["tasks"])}
        self._columns = {name: array(kind, state[name]) for name, kind in _COLUMNS.items()}
        self._answers = dict(state["answers"])
