"""Two evaluations on the same tasks: differences with paired intervals, and which tasks each can solve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr.errors import DataError
from rlvr.evaluation.intervals import interval
from rlvr.evaluation.task_result import TaskResult, values_of

LISTED = 100
"""Ids of gained and of lost tasks that are listed."""


def compare(
    before: Sequence[TaskResult], after: Sequence[TaskResult], ks: Sequence[int], seed: int = 0
) -> dict[str, Any]:
    """`after` against `before` on the tasks that both have.

    `differences`: result -> mean difference, its interval over tasks (the two results of a task stay together) and the
    tasks better and worse. `support` (Yue et al. 2025, "Does reinforcement learning really incentivize reasoning
    capacity ..."): tasks of which a sample or the greedy response is correct in both, in one, in neither. DataError
    where no task is common.
    """
    by_id = {task_result.id: task_result for task_result in before}
    pairs = [(by_id[task_result.id], task_result) for task_result in after if task_result.id in by_id]
    if not pairs:
        raise DataError("the two results have no task in common: they can only be compared on the same tasks")
    first = values_of([a for a, _ in pairs], ks)
    second = values_of([b for _, b in pairs], ks)
    return {
        "tasks": len(pairs),
        "only_before": len(before) - len(pairs),
        "only_after": len(after) - len(pairs),
        "differences": {name: row for name in first if (row := _difference(first[name], second[name], seed))},
        "support": _support(pairs),
    }


def _difference(first: np.ndarray, second: np.ndarray, seed: int) -> dict[str, Any] | None:
    # [T]: NaN where either evaluation has no result of the task. The pairs are resampled as one number, so that the
    # variance between tasks, which both share, cancels.
    change = (second - first)[~np.isnan(second - first)]
    if not len(change):
        return None
    # Fixed seed: the same two files give the same interval.
    low_high = interval(change, seed=seed)
    return {
        "before": float(first[~np.isnan(second - first)].mean()),
        "after": float(second[~np.isnan(second - first)].mean()),
        "difference": float(change.mean()),
        "interval": low_high,
        "better": int((change > 0).sum()),
        "worse": int((change < 0).sum()),
        "tasks": len(change),
    }


def solved(task_result: TaskResult) -> bool:
    """Return whether any response to the task was correct."""
    # A score of 1 is right; partial scores solve nothing.
    return task_result.correct > 0 or task_result.greedy == 1.0


def _support(pairs: Sequence[tuple[TaskResult, TaskResult]]) -> dict[str, Any]:
    gained = [b.id for a, b in pairs if solved(b) and not solved(a)]
    lost = [b.id for a, b in pairs if solved(a) and not solved(b)]
    return {
        "both": sum(solved(a) and solved(b) for a, b in pairs),
        "gained": len(gained),
        "lost": len(lost),
        "neither": sum(not solved(a) and not solved(b) for a, b in pairs),
        "gained_ids": gained[:LISTED],
        "lost_ids": lost[:LISTED],
        # With fewer samples fewer tasks are solved by chance: a reader has to compare the two numbers.
        "samples": [min(a.samples for a, _ in pairs), min(b.samples for _, b in pairs)],
    }
