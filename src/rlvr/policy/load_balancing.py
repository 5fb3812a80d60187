"""Load balancing: rollouts or tensors dealt out to ranks by what they cost."""

from __future__ import annotations

import numpy as np


def deal(costs: np.ndarray, world: int) -> list[np.ndarray]:
    """Positions for each of `world` ranks, in ascending order, so that the dearest rank is little dearer than the mean.

    The dearest item goes first, each to the rank with the least so far (Graham 1969: at most 4/3 of the best possible).
    The same costs give the same deal on every rank.
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    totals = np.zeros(world)
    # Stable, and argmin takes the first of equal ranks: every rank computes the same deal without a message.
    for i in np.argsort(-costs, kind="stable"):
        rank = int(np.argmin(totals))
        ranks[rank].append(int(i))
        totals[rank] += costs[i]
    return [np.sort(np.asarray(rank, dtype=np.int64)) for rank in ranks]
