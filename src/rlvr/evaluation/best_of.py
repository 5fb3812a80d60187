"""Best of k: what is expected of the response that a scorer likes best among k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_of_k(liked: np.ndarray, scores: Sequence[float], k: int) -> float:
    """The unbiased estimate, from n samples, of the score of the one liked best among `k` of them.

    `liked` is what the scorer says of each sample (NaN: less than any other), `scores` what the verifier says. It is the mean over
    all subsets of k: the sample of rank i, from the least liked, is the best of C(i - 1, k - 1) of the C(n, k) subsets. Samples
    that are liked alike share their scores, which is choosing among them at random. ValueError when k is above n.
    """
    count = len(scores)
    if not 1 <= k <= count:
        raise ValueError(f"best@{k} cannot be estimated from {count} samples")
    found = np.asarray(liked, dtype=np.float64)
    _, kind = np.unique(np.where(np.isnan(found), -np.inf, found), return_inverse=True)
    sums, sizes = np.bincount(kind, weights=np.asarray(scores, dtype=np.float64)), np.bincount(kind)
    shared = (sums / sizes)[np.sort(kind)]
    return float(shared @ _chances(count, k))


def _chances(count: int, k: int) -> np.ndarray:
    """[n]: for each rank from the lowest, the share of the subsets of k in which it is the highest."""
    ranks = np.arange(count - 1, k - 1, -1)
    falling = np.concatenate([[k / count], k / count * np.cumprod((ranks - k + 1) / ranks)])
    return np.concatenate([np.zeros(k - 1), falling[::-1]])
