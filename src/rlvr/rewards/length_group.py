"""Rewards for answers shorter than the other right answers of the group. They are relative to a prompt, so that hard
prompts may have long answers.

Lengths are tokens that the policy wrote. Undecided members have no value and stay out of every statistic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec, lengths


@register("reward", "brevity")
@dataclass(frozen=True)
class Brevity(RewardTerm):
    """The value of a right answer by its length compared within the group; wrong answers are worth 0.

    - sigmoid: 1 - alpha sigmoid((L - mean) / std) over the right answers (Arora & Zanette 2025, arXiv 2502.04463, eq.
      4; the penalty of GRPO-lambda, from notes, not confirmed there).
    - range: 1 + alpha (longest - L) / (longest - shortest) over the right answers (a bonus; from notes on arXiv
      2506.15647, a guess at its formula).
    - kimi: alpha (0.5 - (L - shortest) / (longest - shortest)) over all members, for wrong answers at most 0 (Kimi
      k1.5, arXiv 2501.12599, section 2.3.3); it is added to the verdict, while the other two replace it.

    Where all lengths are the same, (L - mean) / std and the range terms are 0. alpha 0 is the verdict (for kimi, 0).
    """

    form: Literal["sigmoid", "range", "kimi"] = "sigmoid"
    """The formula."""
    alpha: Scalar = 0.2
    """Strength, 0 or more."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = lengths(batch)
        alpha = float(self.alpha)
        shape = {"sigmoid": self._sigmoid, "range": self._range, "kimi": self._kimi}[self.form]
        result = np.where(np.isnan(of), np.nan, 0.0)
        for group in batch.groups():
            if self.form == "kimi":
                # Kimi k1.5 takes min_len and max_len over all responses of the prompt, right or wrong.
                compared = np.isfinite(of[group.index])
            else:
                compared = of[group.index] >= 1.0
            index = group.index[compared]
            if len(index):
                result[index] = shape(used[index], of[index] >= 1.0, alpha)
        return result

    @staticmethod
    def _sigmoid(used: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
        spread = used.std()
        if spread > 0:
            # z-score of the length among the right answers; population standard deviation (divided by n).
            z = (used - used.mean()) / spread
        else:
            z = np.zeros(len(used))
        # 1 - alpha sigmoid(z): longer than the mean costs more than alpha / 2, shorter less. |z| is at most sqrt(n -
        # 1), so exp does not overflow.
        return 1 - alpha / (1 + np.exp(-z))

    @staticmethod
    def _range(used: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
        span = used.max() - used.min()
        # The shortest right answer has 1 + alpha, the longest 1.
        return 1 + (alpha * (used.max() - used) / span if span > 0 else np.zeros(len(used)))

    @staticmethod
    def _kimi(used: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
        span = used.max() - used.min()
        if span > 0:
            # lambda = 0.5 - (len - min_len) / (max_len - min_len), from 0.5 for the shortest to -0.5 for the longest.
            bonus = 0.5 - (used - used.min()) / span
        else:
            bonus = np.zeros(len(used))
        # A wrong answer gains nothing by being short: min(0, lambda).
        return alpha * np.where(right, bonus, np.minimum(bonus, 0.0))
