"""Corrections for a verifier that errs at known rates, applied to advantages that were normalised already.

Before a group normalisation such a correction is without effect: it is an affine map of the reward, which the
normalisation undoes. Applied after it, the correction moves the two values that a group's advantages have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.advantages.group import AdvantageValues, means
from rlvr.components import Modifier
from rlvr.records import Batch
from rlvr.registry import register


@register("modifier", "noise")
@dataclass(frozen=True)
class Noise(Modifier):
    """Unbiased advantages under a verifier that accepts and rejects wrongly at given rates.

    With a1 and a0 the mean advantages of a group's accepted and rejected responses and D = 1 - both rates, backward:
    accepted ((1 - false_positive) a1 - false_negative a0) / D, rejected ((1 - false_negative) a0 - false_positive a1) /
    D, whose expectation over the verifier's errors is a1 for a right answer and a0 for a wrong one (Natarajan et al.
    2013, lemma 1; with a1 = 1 and a0 = 0 the backward correction of Cai et al. 2025, arXiv 2510.00915). forward:
    accepted false_negative (a1 - a0), rejected (false_negative - 1) (a1 - a0), whose expectation is 0 for a right
    answer and proportional to a0 - a1 for a wrong one, and which needs one rate only (same paper; with a1 - a0 = 1 its
    weights). The two forms for a1 and a0 are derived here; where the paper's own pipeline applies its weights could not
    be read. Rates of 0 leave backward as it is; forward then differs by a baseline of a1. A group whose responses are
    all accepted or all rejected is left as it is. For rewards 0 and 1; others count as accepted above `threshold`.
    """

    kind: Literal["backward", "forward"] = "backward"
    """Which correction."""
    false_positive: float = 0.0
    """Share of wrong answers that are accepted, 0 to below 1; forward does not read it."""
    false_negative: float = 0.0
    """Share of right answers that are rejected, 0 to below 1."""
    threshold: float = 0.5
    """Rewards above it are accepted."""

    per_response = True

    def __post_init__(self) -> None:
        if min(self.false_positive, self.false_negative) < 0 or self.false_positive + self.false_negative >= 1:
            raise ValueError("both rates must be at least 0, and their sum below 1: else a verdict says nothing")

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> np.ndarray:
        assert isinstance(advantage, np.ndarray), "one advantage per response is needed"
        rewards = batch.column("reward")
        groups = batch.group_index()
        accepted = rewards > self.threshold
        rejected = rewards <= self.threshold  # neither where undecided
        if not len(batch):
            return advantage
        # [B] each: the mean advantage of the accepted (a1) and of the rejected (a0) responses of each response's group.
        a1, a0 = (means(advantage, groups, side.astype(np.float64))[groups] for side in (accepted, rejected))
        # bool [B]: the group has responses of both kinds; a class mean of no response would be made up.
        both = np.bincount(groups, accepted)[groups] * np.bincount(groups, rejected)[groups] > 0
        fp = self.false_positive
        fn = self.false_negative
        if self.kind == "backward":
            up = (1 - fp) * a1 - fn * a0
            down = (1 - fn) * a0 - fp * a1
            # The class means move to (...) / D. A response's deviation from its class mean, if its group has any, is
            # left.
            shift = np.where(accepted, up - (1 - fp - fn) * a1, down - (1 - fp - fn) * a0) / (1 - fp - fn)
            corrected = advantage + shift
        else:
            # E over the verdict: a right answer is accepted with probability 1 - fn, and (1 - fn) fn + fn (fn - 1) = 0.
            corrected = np.where(accepted, fn, fn - 1) * (a1 - a0)
        return np.where(both & (accepted | rejected), corrected, advantage)
