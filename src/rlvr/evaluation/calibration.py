"""Agreement of scores with labels of right and wrong: calibration, ranking, and correlation with another number.

All take float64 arrays [N]; `right` has 0 and 1.
"""

from __future__ import annotations

import numpy as np

# As in the figures of Guo et al.; a score of k votes has few different values, which more bins would not separate.
BINS = 10
"""Bins of equal width from 0 to 1."""


def calibration_error(scores: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """The expected calibration error: the mean over responses of |share of right ones - mean score| of their bin.

    Bin m of M holds the scores in ((m - 1) / M, m / M], the first one 0 too: Guo et al. 2017, "On calibration of modern
    neural networks", arXiv 1706.04599, equations 2 and 3, with the score as the confidence in "right". `scores` are in
    [0, 1].
    """
    which = np.clip(np.ceil(scores * bins).astype(int) - 1, 0, bins - 1)
    # n_b times the difference of the bin's two means is the difference of its two sums.
    gaps = np.bincount(which, weights=right, minlength=bins) - np.bincount(which, weights=scores, minlength=bins)
    return float(np.abs(gaps).sum() / len(scores))


def brier_score(scores: np.ndarray, right: np.ndarray) -> float:
    """The mean squared difference of score and label (Brier 1950); 0 is best, and a constant 0.5 has 0.25."""
    return float(((scores - right) ** 2).mean())


def ranking_auc(scores: np.ndarray, right: np.ndarray) -> float | None:
    """The chance that a right response scores above a wrong one, ties counted half: the area under the ROC curve. None
    where all are right or all wrong."""
    positive = right > 0
    count = int(positive.sum())
    others = len(right) - count
    if not count or not others:
        return None
    # Mann-Whitney: U = sum of the ranks of the right ones - n (n + 1) / 2.
    return float((_ranks(scores)[positive].sum() - count * (count + 1) / 2) / (count * others))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's correlation, tied values having their mean rank. None where one of the two is constant."""
    ranks = [_ranks(values) for values in (first, second)]
    deviations = [values - values.mean() for values in ranks]
    scale = float(np.sqrt((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    return float((deviations[0] * deviations[1]).sum() / scale) if scale else None


def _ranks(values: np.ndarray) -> np.ndarray:
    """float64 [N]: ranks from 1, equal values having their mean rank."""
    _, kind, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return (last - (sizes - 1) / 2)[kind]
