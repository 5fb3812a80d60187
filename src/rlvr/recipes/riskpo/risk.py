"""Risk measures: advantages that weigh parts of the reward distribution, for bundles of prompts.

Invariants: bundles are made of neighbouring groups in the order of the batch and of members in the order of their
number, so the order of groups matters where `bundle` is above 1 and that of members never; rewards that are all the
same in a bundle give exactly 0 (with `track` or without `baseline`: where there is a `scale`); undecided responses
join no bundle, and responses left over in a larger group have 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlvr.advantages.group import by_size, counts, means
from rlvr.components import Advantage
from rlvr.records import Batch
from rlvr.registry import register


@register("advantage", "mvar")
@dataclass
class MixedValueAtRisk(Advantage):
    """Mixed value at risk: the score function of the mean reward below a quantile and of that between two quantiles.

    With s the mean reward of a paper (one response to each prompt of a bundle; with `total` their sum) and q the
    quantiles of s, middle = ((q_lower - s)+ - (q_upper - s)+) / (upper - lower), tail = -(q_lower - s)+ / lower, and
    the paper's advantage is (weight tail + middle) / (weight + 1). RiskPO (Ren et al. 2025, arXiv 2510.00911), as
    compute_grpo_bundle_rvar_outcome_advantage_quantile_tracking of RTkenny/RiskPO, verl/trainer/ppo/core_algos.py,
    whose options are those below. At lower 0 and upper 1 it is the mean objective up to a constant baseline.
    """

    lower: float = 0.2
    """Quantile level of the tail: rewards below that quantile are in it; 0: no tail."""
    upper: float = 0.8
    """Quantile level above which rewards have no gradient."""
    weight: float = 1.5
    """The weight of the tail against the middle, at least 0."""
    bundle: int = 1
    """Prompts per paper (the paper bundles several, so that sums of rewards 0 and 1 have a distribution)."""
    track: float | None = None
    """Rate at which the quantiles follow the papers of step after step; null: the quantiles of each bundle's own
    papers."""
    total: bool = False
    """Score a paper by the sum of its rewards, not by their mean; `track` is then a rate of sums."""
    baseline: bool = True
    """Keep q_lower - q_upper in the middle, which makes no advantage positive; without it the middle is
    (s - q_lower)+ - (s - q_upper)+, and a paper above the lower quantile is reinforced."""
    scale: Literal["none", "std"] = "none"
    """std: divide by the standard deviation (n - 1) of the bundle's scores."""
    credit: Literal["uniform", "sum_mean"] = "uniform"
    """uniform: every response of a paper has the paper's advantage. sum_mean: its share of it, (r - mean of its
    prompt's rewards) over the sum of these differences in the paper; equal shares where that sum is 0."""
    epsilon: float = 1e-6
    """Added to the standard deviation."""
    _quantiles: np.ndarray | None = field(default=None, init=False, repr=False)
    _next: np.ndarray | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.lower < self.upper <= 1:
            raise ValueError(f"0 <= lower < upper <= 1 is needed, not lower {self.lower} and upper {self.upper}")
        if self.weight < 0 or self.bundle < 1 or not (self.track is None or self.track > 0):
            raise ValueError("weight must be at least 0, bundle at least 1, and track above 0 or null")

    @property
    def smallest_group(self) -> int:
        """The smallest group in which the estimator gives an advantage other than 0."""
        return 2 if self.track is None else 1

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        result = np.zeros(len(batch))
        where = np.flatnonzero(np.isfinite(rewards))
        if not len(where):
            return result
        # Numbered anew over the groups with a decided member, so that bundles are of these.
        _, groups = np.unique(batch.group_index()[where], return_inverse=True)
        member = np.asarray([batch.rollouts[i].member for i in where])
        paper, bundles = _papers(groups, member, self.bundle)
        used = where[paper >= 0]
        # float64 [papers]: s, the mean reward of one response to each prompt of the bundle.
        scores = means(rewards[used], paper[paper >= 0])
        # int64 [used]: the paper of each response that is in one.
        papers = paper[paper >= 0]
        if self.total:
            scores = scores * np.bincount(papers)
        low, high = self._levels(scores, bundles)
        values = self._risk(scores, low, high)
        if self.scale == "std":
            values = values / self._deviations(scores, bundles)
        result[used] = values[papers]
        if self.credit == "sum_mean":
            result[used] *= self._shares(rewards[where], groups, paper >= 0, papers)
        return result

    def _deviations(self, scores: np.ndarray, bundles: np.ndarray) -> np.ndarray:
        """float64 [papers]: the deviation of the bundle's scores, infinite where they are all the same."""
        result = np.full(len(scores), np.inf)
        for index in by_size(bundles):
            # [bundles, papers of each]
            if index.shape[1] > 1:
                spread = scores[index].std(axis=1, ddof=1)
                # The authors divide by epsilon alone where there is no spread. Here such a bundle teaches nothing.
                result[index] = np.where(np.ptp(scores[index], axis=1) > 0, spread + self.epsilon, np.inf)[:, None]
            else:
                result[index] = 1.0 + self.epsilon
        return result

    def _shares(self, rewards: np.ndarray, groups: np.ndarray, used: np.ndarray, papers: np.ndarray) -> np.ndarray:
        """float64 [used]: each response's share of its paper's advantage; the shares of a paper sum to 1."""
        differences = (rewards - means(rewards, groups)[groups])[used]
        # [papers]
        total = np.bincount(papers, weights=differences)[papers]
        equal = 1.0 / np.bincount(papers)[papers]
        # 1e-6: the authors' bound for a sum of 0.
        some = np.abs(total) > 1e-6
        return np.where(some, differences / np.where(some, total, 1.0), equal)

    def _levels(self, scores: np.ndarray, bundles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two quantiles for each paper."""
        levels = np.asarray([self.lower, self.upper])
        if self.track is None:
            result = np.empty((2, len(scores)))
            for index in by_size(bundles):
                # np.quantile is [2, bundles]; the new axis gives both quantiles to every paper of the bundle.
                result[:, index] = np.quantile(scores[index], levels, axis=1)[:, :, None]
            return result[0], result[1]
        # The new values wait in _next until the step was trained (`observe`), so that looking at a batch twice moves
        # nothing.
        if self._quantiles is None:
            # The first batch sets the quantiles and does not move them, as in the authors' tracker.
            tracked = np.quantile(scores, levels)
            self._next = tracked
        else:
            tracked = self._quantiles
            # Stochastic approximation: q rises while fewer papers than its level are below it, q += track (level -
            # share below).
            below = (scores < tracked[:, None]).mean(axis=1)
            self._next = tracked + self.track * (levels - below)
        return np.full(len(scores), tracked[0]), np.full(len(scores), tracked[1])

    def _risk(self, s: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        # (q_lower - s)+, the reward that a paper lacks to the lower quantile.
        under = np.maximum(low - s, 0.0)
        middle = (under - np.maximum(high - s, 0.0)) / (self.upper - self.lower)
        if not self.baseline:
            # (s - q)+ = s - q + (q - s)+ on both sides.
            middle = middle + (high - low) / (self.upper - self.lower)
        # There is no tail, and its term would be 0 / 0.
        if self.lower == 0:
            return middle
        return (middle - self.weight * under / self.lower) / (self.weight + 1)

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """The step was trained: the quantiles move."""
        self._quantiles = self._quantiles if self._next is None else self._next

    def state_dict(self) -> dict[str, Any]:
        """The tracked quantiles."""
        return {"quantiles": None if self._quantiles is None else self._quantiles.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the quantiles of a checkpoint."""
        if state["quantiles"] is None:
            self._quantiles = None
        else:
            self._quantiles = np.asarray(state["quantiles"])


def _papers(groups: np.ndarray, member: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(paper of each rollout, -1 where it is in none; bundle of each paper).

    The i-th members of the groups of a bundle are a paper, as many as the smallest of these groups has members.
    """
    order = np.lexsort((member, groups))
    count = counts(groups)
    rank = np.empty(len(groups), dtype=np.int64)
    # int64 [N]: the place of each member in its own group, by member number.
    rank[order] = np.arange(len(groups)) - (np.cumsum(count) - count)[groups[order]]
    bundle = np.arange(len(count)) // size
    # [bundles], starting at no less than any count: the size of the smallest group, as every paper needs a member of
    # each group.
    papers = np.full(int(bundle.max()) + 1, len(groups))
    np.minimum.at(papers, bundle, count)
    first = np.cumsum(papers) - papers
    mine = bundle[groups]
    return np.where(rank < papers[mine], first[mine] + rank, -1), np.repeat(np.arange(len(papers)), papers)
