"""Tasks by their level of difficulty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.evaluation.task_result import TaskResult

# A choice: a table that fits a screen. Above it numbers become ranges, and words are taken for something else (a
# source, a topic).
MOST = 12
"""Largest number of levels that are reported one by one."""
RANGES = 5
"""Number of ranges, of about as many tasks each, into which more than MOST numeric levels are put."""


def by_difficulty(task_results: Sequence[TaskResult]) -> dict[str, list[TaskResult]]:
    """Level -> its tasks, from the easiest; empty where no task has one, or too many different words are used.

    Levels are the texts or numbers that tasks have; where there are many numbers, ranges of them.
    """
    rated = [t for t in task_results if t.difficulty is not None]
    numbers = {t.difficulty for t in rated if isinstance(t.difficulty, (int, float))}
    levels = {t.difficulty for t in rated}
    if len(levels) > MOST:
        if len(numbers) == len(levels):
            return _ranges(rated)
        return {}
    # Numbers by their size, then texts by their letters.
    # False sorts before True, so numbers come first; the second entry is never compared between a number and a text.
    ordered = sorted(levels, key=lambda level: (level not in numbers, level if level in numbers else 0, str(level)))
    return {
        f"{level:g}" if level in numbers else str(level): [t for t in rated if t.difficulty == level]
        for level in ordered
    }


def _ranges(rated: Sequence[TaskResult]) -> dict[str, list[TaskResult]]:
    values = np.asarray([t.difficulty for t in rated], dtype=np.float64)
    # `unique`, where many tasks have one level: equal edges would make empty ranges.
    edges = np.unique(np.quantile(values, np.linspace(0, 1, RANGES + 1)))
    place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    ranges = {}
    for number in range(max(len(edges) - 1, 1)):
        members = [t for t, at in zip(rated, place, strict=True) if at == number]
        if members:
            ranges[f"{edges[number]:.3g} to {edges[min(number + 1, len(edges) - 1)]:.3g}"] = members
    return ranges
