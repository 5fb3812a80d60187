"""The entropy and the likelihood of tokens against float64 loops."""

from __future__ import annotations

import numpy as np
import pytest

from loss_cases import Case, value_and_gradient
from number_oracles import finite_differences
from rlvr.core.needs import CURRENT
from rlvr.losses import EntropyBonus, LikelihoodLoss

AVERAGES = ("tokens", "sequences", "constant")


@pytest.mark.parametrize("average", AVERAGES)
def test_entropy_and_likelihood(average):
    case = Case(3)
    value, gradient = value_and_gradient(EntropyBonus(average), case.batch(), case.over(), ("entropy", CURRENT))
    assert value == pytest.approx(-case.average(case.entropy, average), rel=1e-12)
    np.testing.assert_allclose(
        gradient, finite_differences(lambda x: -case.average(x, average), case.entropy), rtol=1e-6, atol=1e-9
    )
    value, gradient = value_and_gradient(LikelihoodLoss(average), case.batch(), case.over())
    assert value == pytest.approx(-case.average(case.logprobs, average), rel=1e-12)
    np.testing.assert_allclose(
        gradient, finite_differences(lambda x: -case.average(x, average), case.logprobs), rtol=1e-6, atol=1e-9
    )
