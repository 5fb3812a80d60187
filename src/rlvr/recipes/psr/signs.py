"""Positive and negative advantages with a weight each: PSR, NSR and W-REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.advantages.group import AdvantageValues, elementwise
from rlvr.components import Modifier
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register


@register("modifier", "signs")
@dataclass(frozen=True)
class Signs(Modifier):
    """Positive and negative advantages times a weight each.

    With the advantage {name: group, baseline: 0.5, scale: 0.5}, which is 1 for a right answer and -1 for a wrong one:
    negative 0 is PSR, positive 0 is NSR, positive 0.1 is W-REINFORCE (Zhu et al. 2025, arXiv 2506.01347;
    TianHongZXY/RLVR-Decomposed, commit a5d4e7c, verl/trainer/ppo/core_algos.py, `compute_psr_nsr_outcome_advantage`).
    1 and 1 change nothing.
    """

    positive: Scalar = 1.0
    """Weight of positive advantages, at least 0."""
    negative: Scalar = 1.0
    """Weight of negative advantages, at least 0."""

    def __post_init__(self) -> None:
        if any(isinstance(w, (int, float)) and w < 0 for w in (self.positive, self.negative)):
            raise ValueError("the weights must be at least 0: a negative one would train towards wrong answers")

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        up = float(self.positive)
        down = float(self.negative)
        return elementwise(lambda a: np.where(a > 0, up * a, down * a), advantage)  # type: ignore[arg-type]
