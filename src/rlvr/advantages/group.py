"""Group-relative advantages: a baseline and a scale over each group's decided rewards.

Invariants: permuting rollouts or adding other groups changes no advantage (N4); a group whose decided rewards are all
equal has advantages of exactly 0, whatever the floating-point mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.records import Batch
from rlvr.registry import register

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "none"]


@register("advantage", "group")
@dataclass(frozen=True)
class GroupAdvantage:
    """Reward minus a group baseline, over a group scale.

    mean and std: GRPO (Shao et al. 2024, section 4.1.2). mean and none: Dr. GRPO (Liu et al. 2025, eq. 3).
    leave_one_out and none: RLOO (Ahmadian et al. 2024, eq. 7).
    """

    baseline: Baseline = "mean"
    """mean of the group, mean of the other members, or none."""
    scale: Scale = "std"
    """std of the group (population), or none."""
    epsilon: float = 1e-4
    """Added to the std."""

    @property
    def smallest_group(self) -> int:
        """The group size from which the estimator says anything."""
        return 1 if self.baseline == "none" and self.scale == "none" else 2

    def __call__(self, batch: Batch) -> np.ndarray:
        return group_advantage(batch.column("reward"), batch.group_index(), self.baseline, self.scale, self.epsilon)


def group_advantage(
    rewards: np.ndarray, groups: np.ndarray, baseline: Baseline = "mean", scale: Scale = "std", epsilon: float = 1e-4
) -> np.ndarray:
    """Advantages, float64 [B], of `rewards` [B] (NaN undecided) whose groups are numbered by `groups` int [B].

    A group with one decided member has a baseline but nothing to compare: its advantage is 0 (with baseline `none`: its
    reward, unscaled).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    decided = np.isfinite(rewards)
    if not decided.any():
        return np.zeros(len(rewards))
    r, g = rewards[decided], groups[decided]
    size = int(g.max()) + 1
    count = np.bincount(g, minlength=size)
    mean = np.bincount(g, r, minlength=size) / np.maximum(count, 1)
    equal = _equal_groups(r, g, size)

    if baseline == "mean":
        advantage = r - mean[g]
    elif baseline == "leave_one_out":
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        advantage = (r - mean[g]) * (count / np.maximum(count - 1, 1))[g]
    else:
        advantage = r.copy()
    if scale == "std":
        std = np.sqrt(np.bincount(g, (r - mean[g]) ** 2, minlength=size) / np.maximum(count, 1))
        advantage = np.where(equal[g], advantage, advantage / np.where(equal[g], 1.0, std[g] + epsilon))
    if baseline != "none":
        advantage[equal[g]] = 0.0

    result = np.zeros(len(rewards))
    result[decided] = advantage
    return result


def _equal_groups(rewards: np.ndarray, groups: np.ndarray, size: int) -> np.ndarray:
    """bool [size]: whether all rewards of a group are the same number."""
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, groups, rewards)
    np.maximum.at(high, groups, rewards)
    return low >= high
