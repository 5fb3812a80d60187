"""Uncertainty of a mean over tasks: bootstrap intervals, and the interquartile mean.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (rliable): intervals by
resampling, the interquartile mean in place of the median, paired comparison. Resampled are tasks; several runs (seeds)
of the same tasks are resampled run by run within each task.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlvr.core.seeding import seed_of

# The ends of a 95 % interval are then its 50th values from below and above. rliable takes 50,000 by default.
RESAMPLES = 2000
# 16 MB of float64: a matrix of all resamples of many tasks would take gigabytes.
CHUNK = 2_000_000
"""Numbers drawn at a time."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""[.., T] -> [..]"""


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """The mean of the middle half along the last axis: a quarter of the values, rounded down, is cut off at each
    end."""
    count = values.shape[-1]
    # As scipy.stats.trim_mean(values, 0.25), which rliable calls.
    cut = count // 4
    return np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1)


def plain_mean(values: np.ndarray) -> np.ndarray:
    """The mean along the last axis."""
    return values.mean(axis=-1)


def interval(
    values: np.ndarray,
    statistic: Statistic = plain_mean,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of `statistic` over tasks; None of no task.

    `values` is [T], or [R, T] for R runs on the same tasks; NaN (of a [T]) is left out.
    """
    if values.ndim == 1:
        values = values[~np.isnan(values)]
    runs, count = (1, len(values)) if values.ndim == 1 else values.shape
    if count == 0:
        return None
    # The seed depends on the shape alone, so that metrics of the same tasks are resampled alike.
    random = np.random.default_rng(seed_of("bootstrap", seed, count, runs))
    statistics = []
    size = max(1, CHUNK // (count * runs))
    for begin in range(0, resamples, size):
        number = min(size, resamples - begin)
        if values.ndim == 1:
            chosen = values[random.integers(count, size=(number, count))]
        else:
            # Stratified: for each task (last axis) the runs are drawn anew with replacement; the tasks stay. [number,
            # R, T]
            which = random.integers(runs, size=(number, runs, count))
            chosen = np.take_along_axis(values[None], which, axis=1).reshape(number, runs * count)
        statistics.append(statistic(chosen))
    low, high = np.quantile(np.concatenate(statistics), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
