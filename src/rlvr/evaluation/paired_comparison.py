"""Paired comparison of two evaluations on their common tasks: mean differences with bootstrap intervals, and the tasks
that only one of them solves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr.errors import DataError
from rlvr.evaluation.estimators import interval
from rlvr.evaluation.task_result import TaskResult, values_of
from rlvr.monitor.console_text import percent

LISTED = 100
"""Maximum number of ids in each of `gained_ids` and `lost_ids`."""


def compare(
    before: Sequence[TaskResult], after: Sequence[TaskResult], ks: Sequence[int], seed: int = 0
) -> dict[str, Any]:
    """Compare `after` with `before` on the tasks that both have.

    `differences`: for each metric (`greedy`, `mean`, `pass@k` ...) the mean difference, its paired bootstrap interval
    over tasks, and the numbers of tasks with a higher and a lower value. `support` (Yue et al. 2025, "Does
    reinforcement learning really incentivize reasoning capacity ..."): the numbers of tasks that both, only `after`
    (gained), only `before` (lost) or neither solved, with at least one correct response. DataError where the two have
    no task in common.
    """
    by_id = {task_result.id: task_result for task_result in before}
    pairs = [(by_id[task_result.id], task_result) for task_result in after if task_result.id in by_id]
    if not pairs:
        raise DataError("the two evaluations have no task in common: only results of the same tasks can be compared")
    values_before = values_of([a for a, _ in pairs], ks)
    values_after = values_of([b for _, b in pairs], ks)
    return {
        "tasks": len(pairs),
        "only_before": len(before) - len(pairs),
        "only_after": len(after) - len(pairs),
        "differences": {
            name: row
            for name in values_before
            # `best@k` needs a scorer, which only one of the two evaluations may have had.
            if name in values_after and (row := _difference(values_before[name], values_after[name], seed))
        },
        "support": _support(pairs),
    }


def _difference(before: np.ndarray, after: np.ndarray, seed: int) -> dict[str, Any] | None:
    """The comparison of one metric, given for each task [T] with NaN for no value; None where no task has both."""
    paired = ~np.isnan(after - before)
    # The bootstrap resamples the difference of each task, so that the variance between tasks, which both evaluations
    # share, cancels.
    change = (after - before)[paired]
    if not len(change):
        return None
    return {
        "before": float(before[paired].mean()),
        "after": float(after[paired].mean()),
        "difference": float(change.mean()),
        "interval": interval(change, seed=seed),
        "better": int((change > 0).sum()),
        "worse": int((change < 0).sum()),
        "tasks": len(change),
    }


def solved(task_result: TaskResult) -> bool:
    """Return True if a sample or the greedy response has a score of 1. A partial score is not enough."""
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
        # The fewest decided samples of a task, in `before` and in `after`: the side with more samples solves more tasks
        # by chance, so `gained` and `lost` are comparable only where the two numbers are close.
        "samples": [min(a.samples for a, _ in pairs), min(b.samples for _, b in pairs)],
    }


def comparison_lines(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a comparison for a reader: each difference in points with its interval, and the tasks that
    were gained and lost."""
    for name, change in comparison["differences"].items():
        low, high = change["interval"]
        yield (
            f"{name}: {percent(change['before'])} -> {percent(change['after'])} ({100 * change['difference']:+.1f} "
            f"points; 95 %: {100 * low:+.1f} to {100 * high:+.1f})"
        )
    if (solved := comparison.get("support")) is not None:
        yield (
            f"tasks with a right response: {solved['both']} before and after, {solved['gained']} gained, "
            f"{solved['lost']} lost, {solved['neither']} never"
        )
