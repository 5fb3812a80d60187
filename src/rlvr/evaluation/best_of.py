"""Best of k: the expected score of the response that a scorer ranks first among k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_of_k(ranking: np.ndarray, scores: Sequence[float], k: int) -> float:
    """Return the unbiased estimate, from n samples, of the verifier's score of the sample that the scorer ranks first
    among `k`.

    `ranking` is the scorer's number for each sample, [n] (NaN ranks last); `scores` are the verifier's, [n]. The
    estimate is the mean over all subsets of k: the sample of rank i, from the lowest, is the best of C(i - 1, k - 1) of
    the C(n, k) subsets. Samples of equal rank share their scores, which is a choice among them at random. Raises
    ValueError when k is above n.
    """
    count = len(scores)
    if not 1 <= k <= count:
        raise ValueError(f"best@{k} cannot be estimated from {count} samples")
    ranks = np.asarray(ranking, dtype=np.float64)
    # `kind` numbers the distinct ranks from the lowest; `shared` has for each sample, in order of rank, the mean score
    # of its kind.
    _, kind = np.unique(np.where(np.isnan(ranks), -np.inf, ranks), return_inverse=True)
    sums = np.bincount(kind, weights=np.asarray(scores, dtype=np.float64))
    sizes = np.bincount(kind)
    shared = (sums / sizes)[np.sort(kind)]
    return float(shared @ _chances(count, k))


def _chances(count: int, k: int) -> np.ndarray:
    """[n]: for each rank from the lowest, the share of the subsets of k in which it is the highest."""
    # The chance of rank i is C(i-1, k-1) / C(n, k). For i = n that is k / n, and from i + 1 to i it is multiplied by (i
    # - k + 1) / i, which never overflows.
    ranks = np.arange(count - 1, k - 1, -1)
    falling = np.concatenate([[k / count], k / count * np.cumprod((ranks - k + 1) / ranks)])
    return np.concatenate([np.zeros(k - 1), falling[::-1]])
