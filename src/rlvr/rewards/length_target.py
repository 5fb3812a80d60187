"""Target lengths: fixed, from the task, or relative to the group.

Lengths are tokens that the policy wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rlvr.components import RewardContext, RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.errors import ConfigError
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.composition import pass_rates
from rlvr.rewards.terms import TermSpec, lengths


@register("reward", "length_target")
@dataclass(frozen=True)
class LengthTarget(RewardTerm):
    """The value of the length, to be added to the verdict.

    - step: alpha for a right answer of at most `target` tokens, else 0 (LASER, Liu et al. 2025, arXiv 2505.15612; alpha
      from notes).
    - exact: -alpha |target - L| (L1-Exact, Aggarwal & Welleck 2025, arXiv 2503.04697, eq. 1; alpha there 0.0003).
    - at_most: for a right answer clip(alpha (target - L) + 0.5, 0, 1), else 0 (L1-Max, eq. 2, where it is multiplied
      with the verdict: it replaces the verdict then).
    """

    target: Scalar | str = 256
    """Tokens, or the name of a field of the task's info that holds them."""
    form: Literal["step", "exact", "at_most"] = "step"
    """The formula."""
    alpha: Scalar = 0.5
    """Strength: the bonus of step, the slope of the others."""
    relative: Literal["right", "all"] | None = None
    """The target is a factor of the mean length of the group's right answers (of its decided members where none is
    right), or of all its decided members; null: it is in tokens."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)

    def bind(self, setting: RewardContext) -> LengthTarget:
        """Checks that the tasks have the field."""
        if isinstance(self.target, str):
            for task in setting.tasks:
                value = task.info.get(self.target)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                    raise ConfigError(
                        f"rewards: length_target takes its target from info.{self.target}, and {task.named} has "
                        f"{value!r} there: a number above 0 is needed"
                    )
        return self

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = lengths(batch)
        right = of >= 1.0
        alpha = float(self.alpha)
        target = self._targets(batch)
        if self.relative is not None:
            # `target` is a factor here, and the product is in tokens, [B]; NaN in groups without a decided member,
            # whose values are NaN anyway.
            target = target * typical_lengths(used, of, batch, self.relative == "right")
        if self.form == "step":
            values = np.where(right & (used <= target), alpha, 0.0)
        elif self.form == "exact":
            # L1-Exact: r = [right] - alpha |n_target - n|; the verdict is a term of its own.
            values = -alpha * np.abs(target - used)
        else:
            # L1-Max: delta = 0.5, so that a right answer of exactly the target's length has half of the reward.
            values = np.where(right, np.clip(alpha * (target - used) + 0.5, 0.0, 1.0), 0.0)
        return np.where(np.isnan(of), np.nan, values)

    def _targets(self, batch: Batch) -> np.ndarray:
        if isinstance(self.target, str):
            return np.asarray([r.task.info[self.target] for r in batch.rollouts], dtype=np.float64)
        return np.full(len(batch), float(self.target))


def typical_lengths(used: np.ndarray, of: np.ndarray, batch: Batch, right_first: bool) -> np.ndarray:
    """float64 [B]: the mean length of the group's right answers if asked and there are any, else of its decided
    members; else NaN."""
    groups = batch.group_index()
    if not len(groups):
        return np.zeros(0)
    everyone = pass_rates(np.where(np.isnan(of), np.nan, used), groups)
    right = pass_rates(np.where(of >= 1.0, used, np.nan), groups)
    if right_first:
        return np.where(np.isnan(right), everyone, right)[groups]
    return everyone[groups]
