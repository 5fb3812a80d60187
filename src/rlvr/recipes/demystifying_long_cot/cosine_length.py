"""The cosine reward: what a right and what a wrong response is worth, by its length."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from rlvr.components import RewardContext
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.length_terms import OfRightAndWrong
from rlvr.rewards.terms import lengths


@register("reward", "cosine_length")
@dataclass(frozen=True)
class CosineLength(OfRightAndWrong):
    """Right or wrong, each worth a different amount by length: long + (short - long) (1 + cos(pi L / max_length)) / 2.

    The cosine reward (Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv 2502.03373; shape
    by eddycmu/demystify-long-cot, commit e90cf9b, openrlhf/openrlhf/reward/cosine.py, ends by
    openrlhf/scripts/section_4__impact_of_reward_design_on_long_cot): short right answers are worth most, short wrong
    ones least, and a response that reached max_length has one value. Replaces the verdict in `rewards`. With both ends
    the same it is the verdict.
    """

    right: tuple[float, float] = (2.0, 1.0)
    """Value of a right answer of length 0, and of one that is max_length long."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """The same of a wrong answer."""
    exceeded: Scalar = -10.0
    """Value of a response that is max_length long."""
    max_length: int | None = None
    """The longest response; null: `rollout.max_new_tokens`."""

    def bind(self, setting: RewardContext) -> CosineLength:
        """With the run's longest response."""
        return dataclasses.replace(self, max_length=self.max_length or setting.config.rollout.max_new_tokens)

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        assert self.max_length is not None, "bind was not called"
        used = lengths(batch)
        # 1 at length 0, 0 at max_length: long + (short - long) way. `used` may exceed max_length, which the next lines
        # replace.
        way = (1 + np.cos(np.pi * np.minimum(used / self.max_length, 1.0))) / 2
        (r0, r1) = self.right
        (w0, w1) = self.wrong
        values = np.where(of >= 1.0, r1 + (r0 - r1) * way, w1 + (w0 - w1) * way)
        values = np.where(used >= self.max_length, float(self.exceeded), values)
        return np.where(np.isnan(of), np.nan, values)
