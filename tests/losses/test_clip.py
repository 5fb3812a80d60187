"""The clipped loss against nested float64 loops and finite differences of those loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loss_cases import Case, value_and_gradient
from number_oracles import clipped, finite_differences
from rlvr.core.needs import CURRENT
from rlvr.losses import ClippedPolicyLoss, Denominators, TokenBatch

AVERAGES = ("tokens", "sequences", "constant")


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.05, 0.6), (0.5, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_clipped_policy_loss(average, low, high, seed):
    case = Case(seed)

    def oracle(logprobs):
        tokens = zip(logprobs, case.proximal, case.advantage, strict=True)
        return case.average([clipped(*token, low, high) for token in tokens], average)

    loss = ClippedPolicyLoss(low, high, average)
    value, gradient = value_and_gradient(loss, case.batch(), case.over())
    assert value == pytest.approx(oracle(case.logprobs), rel=1e-12)
    ratio = np.exp(case.logprobs - case.proximal)
    smooth = (np.abs(ratio - 1 + low) > 1e-4) & (np.abs(ratio - 1 - high) > 1e-4)
    assert smooth.sum() > 10
    np.testing.assert_allclose(
        gradient[smooth], finite_differences(oracle, case.logprobs)[smooth], rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        # slope is the derivative of the loss in log pi: -ratio A inside, 0 where the clip binds
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # above 1 + high, rewarded: clipped
        (1.5, -2.0, 3.0, 3.0),  # above, punished: not clipped
        (0.5, 2.0, -1.0, -1.0),  # below 1 - low, rewarded: not clipped
        (0.5, -2.0, 1.6, 0.0),  # below, punished: clipped
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_the_clip_by_hand(ratio, advantage, value, slope):
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    one, proximal = torch.ones(1, dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    tokens = TokenBatch(
        sequence=torch.tensor([0]),
        sequences=1,
        weight=one,
        advantage=one * advantage,
        proximal_logprobs=proximal,
        behaviour_logprobs=proximal,
        statistics={("logprobs", CURRENT): logprobs},
    )
    term = ClippedPolicyLoss(0.2, 0.3, "tokens")(tokens, Denominators(1, 1, 1))
    term.value.backward()
    assert float(term.value.detach()) == pytest.approx(value, rel=1e-12)
    assert float(logprobs.grad) == pytest.approx(slope, abs=1e-12)
    assert float(term.metrics["ratio/clipped_high"]) == (ratio == 1.5 and advantage > 0)
    assert float(term.metrics["ratio/clipped_low"]) == (ratio == 0.5 and advantage < 0)
    assert float(term.metrics["ratio/mean"]) == pytest.approx(ratio)


@given(seed=st.integers(0, 10**6), spread=st.floats(0.01, 1.5), average=st.sampled_from(AVERAGES))
@settings(max_examples=40, deadline=None)
def test_clip_value_for_random_cases(seed, spread, average):
    case = Case(seed, tuple(np.random.default_rng(seed).integers(1, 6, 5)), spread)
    assume(case.over().tokens > 0)
    tokens = zip(case.logprobs, case.proximal, case.advantage, strict=True)
    want = case.average([clipped(*token, 0.1, 0.3) for token in tokens], average)
    value = ClippedPolicyLoss(0.1, 0.3, average)(case.batch(), case.over()).value
    assert float(value.detach()) == pytest.approx(want, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("average", AVERAGES)
def test_at_ratio_one_the_gradient_is_reinforce_whatever_the_clip(average):
    case = Case(0)
    case.proximal = case.logprobs.copy()

    def reinforce(logprobs):
        return case.average(-case.advantage * logprobs, average)

    want = finite_differences(reinforce, case.logprobs)
    for low, high in [(0.2, 0.28), (1.0, 1e9), (0.01, 0.01)]:
        _, gradient = value_and_gradient(ClippedPolicyLoss(low, high, average), case.batch(), case.over())
        np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("average", AVERAGES)
def test_a_huge_clip_is_the_importance_weighted_loss(average):
    case = Case(1, spread=2.0)
    want = case.average(-np.exp(case.logprobs - case.proximal) * case.advantage, average)
    value, gradient = value_and_gradient(ClippedPolicyLoss(1.0, 1e9, average), case.batch(), case.over())
    assert value == pytest.approx(want, rel=1e-12)
    fd = finite_differences(lambda x: case.average(-np.exp(x - case.proximal) * case.advantage, average), case.logprobs)
    np.testing.assert_allclose(gradient, fd, rtol=1e-6, atol=1e-8)


def test_a_ratio_that_overflows_where_the_clip_binds_has_gradient_zero():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-100.0, -1.0])
    one = torch.ones(2)
    tokens = TokenBatch(
        sequence=torch.tensor([0, 0]),
        sequences=1,
        weight=one,
        advantage=one,
        proximal_logprobs=proximal,
        behaviour_logprobs=proximal,
        statistics={("logprobs", CURRENT): logprobs},
    )
    ClippedPolicyLoss(average="tokens")(tokens, Denominators(2, 1, 1)).value.backward()
    assert logprobs.grad.tolist() == [0.0, -0.5]
