"""Corrections for a verifier that errs at known rates, applied to advantages after the group normalisation.

Before the group normalisation a correction has no effect (but for epsilon): it is an affine map of the reward, and
subtracting the mean and dividing by the standard deviation undoes an affine map. With rewards 0 and 1 the normalised
advantages of a group have two values, which the correction moves.
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
    """Advantages corrected for a verifier that wrongly accepts and wrongly rejects at given rates.

    Let fp = false_positive, fn = false_negative and D = 1 - fp - fn, and let a1 and a0 be the mean advantages of a
    group's accepted and rejected responses.

    | kind | accepted | rejected | expectation for a right answer | for a wrong answer |
    |---|---|---|---|---|
    | backward | ((1 - fp) a1 - fn a0) / D | ((1 - fn) a0 - fp a1) / D | a1 | a0 |
    | forward | fn (a1 - a0) | (fn - 1) (a1 - a0) | 0 | D (a0 - a1) |

    The expectation is over the verifier's errors, with a1 and a0 held fixed. backward keeps the difference between a
    response's advantage and the mean of its class; forward drops it.

    Sources: backward is Natarajan et al. 2013, lemma 1, and with a1 = 1 and a0 = 0 the backward correction of Cai et
    al. 2025, arXiv 2510.00915; forward with a1 - a0 = 1 has the weights of the forward correction in the same paper.
    The forms for other a1 and a0 are derived here. It could not be verified at which point the paper's own pipeline
    applies its weights.

    With both rates 0, backward changes nothing, and forward gives the mean of each class minus a1. A group whose
    responses are all accepted or all rejected is not changed. Meant for rewards 0 and 1; any reward above `threshold`
    counts as accepted.
    """

    kind: Literal["backward", "forward"] = "backward"
    """The correction: backward reads both rates, forward false_negative alone."""
    false_positive: float = 0.0
    """Share of wrong answers that the verifier accepts, from 0. The two rates together are below 1."""
    false_negative: float = 0.0
    """Share of right answers that the verifier rejects, from 0."""
    threshold: float = 0.5
    """A reward above it counts as accepted."""

    per_response = True

    def __post_init__(self) -> None:
        if min(self.false_positive, self.false_negative) < 0 or self.false_positive + self.false_negative >= 1:
            raise ValueError(
                "both rates must be at least 0, and their sum below 1: else acceptance is no evidence of a right answer"
            )

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> np.ndarray:
        assert isinstance(advantage, np.ndarray), "one advantage per response is needed"
        rewards = batch.column("reward")
        groups = batch.group_index()
        accepted = rewards > self.threshold
        rejected = rewards <= self.threshold  # an undecided reward (NaN) is neither accepted nor rejected
        if not len(batch):
            return advantage
        # [B] each: for each response, the mean advantage of the accepted (a1) and the rejected (a0) ones of its group.
        a1, a0 = (means(advantage, groups, side.astype(np.float64))[groups] for side in (accepted, rejected))
        # bool [B]: whether the response's group has responses of both classes. Otherwise one of the means is undefined.
        both = np.bincount(groups, accepted)[groups] * np.bincount(groups, rejected)[groups] > 0
        fp = self.false_positive
        fn = self.false_negative
        if self.kind == "backward":
            accepted_numerator = (1 - fp) * a1 - fn * a0
            rejected_numerator = (1 - fn) * a0 - fp * a1
            # The shift moves each class mean to its corrected value and keeps the deviation of a response from it.
            shift = np.where(
                accepted, accepted_numerator - (1 - fp - fn) * a1, rejected_numerator - (1 - fp - fn) * a0
            ) / (1 - fp - fn)
            corrected = advantage + shift
        else:
            # A right answer is accepted with probability 1 - fn, so its mean is (1 - fn) fn + fn (fn - 1) = 0.
            corrected = np.where(accepted, fn, fn - 1) * (a1 - a0)
        return np.where(both & (accepted | rejected), corrected, advantage)
