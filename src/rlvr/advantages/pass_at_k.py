"""Advantages that train pass@k: what a response adds to the best of k drawn from its group, without drawing.

With the n decided rewards of a group sorted, r_1 <= ... <= r_n, the best of a random k-subset is r_j with probability
C(j-1, k-1) / C(n, k), so every expectation over subsets is a weighted sum, exact for rewards of any kind. Invariants:
ties may be broken in any way; equal rewards give exactly 0; a group with fewer than k decided members uses all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.advantages.group import by_size, stds
from rlvr.components import Advantage
from rlvr.records import Batch
from rlvr.registry import register


@register("advantage", "pass_at_k")
@dataclass(frozen=True)
class PassAtK(Advantage):
    """The expected best of k responses given that this one is among them, minus a baseline.

    mean and std: pass@k training with its analytical advantage (Chen et al. 2025, arXiv 2508.10751, eq. 11 to 15, which
    are the case of rewards 0 and 1; RUCAIBox/Passk_Training, commit 00474d7, code/passk_adv.py, `calc_adv`); with k 1
    it is GRPO. leave_one_out and none: PKPO (Walder and Karkhanis 2025, arXiv 2505.15201, eq. 33, up to the factor
    k / n, the same for all; kpahwa16/pass-k-policy-optimization, commit 1b0928e, pkpo_core.py, `sloo_minus_one`, by
    others); at k = n only the best response has an advantage, the best minus the second best (Tang et al. 2025, arXiv
    2503.19595; volcengine/verl, commit b178a3c, verl/trainer/ppo/core_algos.py,
    `compute_grpo_passk_outcome_advantage`). The papers' texts were not opened.
    """

    k: int = 2
    """Number of responses of which the best one counts; at least 1, at most the group's size."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """mean: the expected best of any k members; leave_one_out: the best of the same k without this response."""
    scale: Literal["std", "none"] = "std"
    """std: with baseline mean the standard deviation of the best over the k-subsets; with leave_one_out that of the
    group's rewards; none: 1."""
    epsilon: float = 1e-4
    """Added to the standard deviation; above 0."""
    unbiased: bool = False
    """With baseline leave_one_out, the standard deviation with n - 1."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k is {self.k}: it must be at least 1")
        if self.k == 1 and self.baseline == "leave_one_out":
            raise ValueError(
                "the best of no response is undefined: with k 1 use the advantage group with leave_one_out"
            )

    @property
    def smallest_group(self) -> int:
        """The smallest group in which the estimator gives an advantage other than 0."""
        return max(2, self.k)

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        result = np.zeros(len(batch))
        decided = np.isfinite(rewards)
        r = rewards[decided]
        g = batch.group_index()[decided]
        advantage = np.zeros(len(r))
        # index is [groups of this size, n]: groups of one size are computed as one matrix.
        for index in by_size(g) if len(r) else ():
            order = np.argsort(r[index], axis=1, kind="stable")
            index = np.take_along_axis(index, order, axis=1)
            # Sorted, so equal first and last mean that all are equal: their advantage stays exactly 0.
            mixed = index[r[index[:, 0]] < r[index[:, -1]]]
            if len(mixed):
                values = self._of_sorted(r[mixed])
                # What is 0 in exact arithmetic comes out as some 1e-16 of the group's range. 1e-12 is above that, and
                # below any difference that rewards have on purpose.
                rounding = 1e-12 * np.ptp(r[mixed], axis=1, keepdims=True)
                advantage[mixed] = np.where(np.abs(values) > rounding, values, 0.0)
        result[decided] = advantage
        return result

    def _of_sorted(self, r: np.ndarray) -> np.ndarray:
        """[G, n] rewards in rising order -> advantages in the same places."""
        n = r.shape[1]
        k = min(self.k, r.shape[1])
        if self.baseline == "leave_one_out":
            return self._marginal(r, k)
        # [n]: P(the best of k is r_j) = C(j, k - 1) / C(n, k), j from 0: the k - 1 others are among the j below.
        best = _ratios(range(n), k - 1, n, k)
        mean = r @ best
        # With this response at rank p: it is the best when the k-1 others are below it, else a higher one is.
        own = _ratios(range(n), k - 1, n - 1, k - 1)
        # P(r_q is the best of k | response p is among them) for q > p: C(q - 1, k - 2) / C(n - 1, k - 1), the k - 2
        # others being among the q - 1 below q that are not p.
        above = _ratios(range(-1, n - 1), k - 2, n - 1, k - 1)
        # [G, n]: sum over q > p, a cumulative sum from the right without the own summand.
        higher = np.cumsum((r * above)[:, ::-1], axis=1)[:, ::-1] - r * above
        advantage = r * own + higher - mean[:, None]
        if self.scale == "std":
            # The deviation of the best over all k-subsets, sqrt(E[(best - mean)^2]).
            advantage /= np.sqrt(((r - mean[:, None]) ** 2) @ best)[:, None] + self.epsilon
        return advantage

    def _marginal(self, r: np.ndarray, k: int) -> np.ndarray:
        """E[best(S) - best(S without i) | i in S], S a k-subset: i counts where all others of S are below it."""
        n = r.shape[1]
        # With response p best, r_q with q < p is the best of the others with probability C(q, k - 2) / C(n - 1, k - 1);
        # the advantage is the sum over q < p of (r_p - r_q) times that.
        second = _ratios(range(n), k - 2, n - 1, k - 1)
        below = np.cumsum(r * second, axis=1) - r * second
        share = np.cumsum(second) - second
        advantage = r * share - below
        if self.scale == "std":
            rows = np.repeat(np.arange(len(r)), n)
            advantage = advantage / (stds(r.ravel(), rows, self.unbiased)[:, None] + self.epsilon)
        return advantage


def _ratios(tops: range, bottom: int, n: int, k: int) -> np.ndarray:
    """C(t, bottom) / C(n, k) for each t of `tops`, in exact integers until the division; 0 where there is none."""
    total = math.comb(n, k)
    return np.asarray([math.comb(t, bottom) / total if t >= 0 and bottom >= 0 else 0.0 for t in tops])
