"""TOPR: the tapered loss against loops in Python floats and finite differences of those."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loss_cases import Case, check, same_sign
from rlvr.recipes.topr.topr import TaperedLoss

AVERAGES = ("tokens", "sequences", "constant")


@pytest.mark.parametrize("average", AVERAGES)
def test_topr(average):
    """Case's behaviour log-probs are its proximal ones."""
    case = same_sign(Case(8, spread=0.5))
    weights = np.zeros(len(case.sequence))
    for s in range(case.S):
        where = np.flatnonzero(case.sequence == s)
        ratio = math.exp(math.fsum(case.logprobs[where] - case.proximal[where]))
        weights[where] = [1.0 if case.advantage[t] >= 0 else min(max(ratio, 0.0), 1.0) for t in where]
    assert len({w for w, a in zip(weights, case.advantage, strict=True) if a < 0}) > 1
    check(TaperedLoss(average=average), case, lambda x: case.average(-weights * case.advantage * x, average))
