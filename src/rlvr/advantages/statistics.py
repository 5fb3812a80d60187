"""Statistics of groups and of a batch's tokens, as vectorised numpy functions that the estimators and modifiers share.

Groups are numbered 0 .. G-1 by an int array [B]. Invariants: no loop over groups or rollouts but the one that reads the
records; a statistic of a group depends on its members only, and on their order only by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlvr.records import Batch, Origin

Advantage = np.ndarray | list[np.ndarray]
"""One number per rollout, float64 [B], or one array [T_b] per rollout with a number per token."""


def counts(groups: np.ndarray) -> np.ndarray:
    """int64 [G]: the members of each group."""
    return np.bincount(groups)


def means(values: np.ndarray, groups: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """float64 [G]: the mean of each group, weighted if asked; where all weights of a group are 0, the plain mean."""
    size = int(groups.max()) + 1 if len(groups) else 0
    if weights is None:
        return np.bincount(groups, values, minlength=size) / np.maximum(np.bincount(groups, minlength=size), 1)
    total = np.bincount(groups, weights, minlength=size)
    weighted = np.bincount(groups, weights * values, minlength=size) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, weighted, means(values, groups))


def stds(values: np.ndarray, groups: np.ndarray, unbiased: bool = False) -> np.ndarray:
    """float64 [G]: the standard deviation of each group; unbiased divides by n - 1 (a group of one has 0)."""
    size = np.bincount(groups)
    squares = np.bincount(groups, (values - means(values, groups)[groups]) ** 2, minlength=len(size))
    return np.sqrt(squares / np.maximum(size - int(unbiased), 1))


def std(values: np.ndarray, weights: np.ndarray | None = None, unbiased: bool = False) -> float:
    """The standard deviation of all `values`, exactly 0 where they are all the same number (or there is none).

    `weights` counts each value so many times; unbiased divides by the total count minus 1.
    """
    weights = np.ones(len(values)) if weights is None else weights
    counted = values[weights > 0]
    if not len(counted) or counted.min() == counted.max():
        return 0.0
    mean = np.average(values, weights=weights)
    return float(np.sqrt((weights * (values - mean) ** 2).sum() / max(weights.sum() - int(unbiased), 1.0)))


def same(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """bool [G]: whether all values of a group are the same number; a group without members counts as one."""
    size = int(groups.max()) + 1 if len(groups) else 0
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low >= high


def by_size(groups: np.ndarray) -> Iterator[np.ndarray]:
    """The positions of the members, int64 [groups of that size, size], for each size of group, smallest size first."""
    order = np.argsort(groups, kind="stable")
    size = np.bincount(groups)
    starts = np.cumsum(size) - size
    for n in np.unique(size[size > 0]):
        yield order[starts[size == n][:, None] + np.arange(n)]


def decided(batch: Batch) -> np.ndarray:
    """bool [B]: the rollouts whose reward is a number."""
    return np.isfinite(batch.column("reward"))


@dataclass(frozen=True)
class Tokens:
    """All tokens of a batch's rollouts, one after the other: N of them."""

    sizes: np.ndarray
    """int64 [B], tokens of each rollout"""
    sampled: np.ndarray
    """bool [N], written by the policy"""

    @classmethod
    def of(cls, batch: Batch) -> Tokens:
        """The tokens of `batch`."""
        origins = [r.origin for r in batch.rollouts]
        sizes = np.fromiter(map(len, origins), dtype=np.int64, count=len(origins))
        return cls(sizes, np.concatenate(origins or [np.empty(0)]) == Origin.POLICY)

    @property
    def lengths(self) -> np.ndarray:
        """float64 [B]: tokens of each rollout that the policy wrote."""
        return self.sums(self.sampled.astype(np.float64))

    @property
    def rollout(self) -> np.ndarray:
        """int64 [N]: the rollout of each token."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[N] -> [B]: sums over each rollout."""
        return np.bincount(self.rollout, values, minlength=len(self.sizes))

    def flat(self, values: Advantage) -> np.ndarray:
        """float64 [N]: a column, one number per rollout or one array per rollout, over all tokens."""
        if isinstance(values, list):
            return np.concatenate(values or [np.empty(0)]).astype(np.float64)
        return np.repeat(np.asarray(values, dtype=np.float64), self.sizes)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """[N] -> one array per rollout."""
        ends = np.cumsum(self.sizes).tolist()
        return [values[end - size : end] for end, size in zip(ends, self.sizes.tolist(), strict=True)]


def elementwise(function: np.ufunc, advantage: Advantage, *more: float) -> Advantage:
    """`function(advantage, *more)` on every number, in the form that `advantage` has."""
    if isinstance(advantage, list):
        return [function(values, *more) for values in advantage]
    return function(advantage, *more)
