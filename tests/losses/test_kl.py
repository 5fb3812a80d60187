"""Estimators of the KL divergence against float64 loops and on a small distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loss_cases import Case, value_and_gradient
from number_oracles import divergence, finite_differences
from rlvr.losses import KLPenalty, k1, k2, k3

AVERAGES = ("tokens", "sequences", "constant")


KL = {"k1": k1, "k2": k2, "k3": k3}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", list(KL))
def test_kl(average, name):
    case = Case(2)

    def oracle(logprobs):
        return case.average([divergence(name, x, r) for x, r in zip(logprobs, case.reference, strict=True)], average)

    value, gradient = value_and_gradient(KLPenalty(KL[name], average), case.batch(), case.over())
    assert value == pytest.approx(oracle(case.logprobs), rel=1e-12)
    np.testing.assert_allclose(gradient, finite_differences(oracle, case.logprobs), rtol=1e-6, atol=1e-9)


@given(logprob=st.floats(-30, 0, width=32), gap=st.floats(-20, 20, width=32))
@settings(max_examples=200, deadline=None)
def test_k3_is_never_negative_and_all_are_zero_when_equal(logprob, gap):
    pi = torch.tensor([logprob], dtype=torch.float32)
    assert float(k3(pi, pi + gap)) >= 0
    for estimator in KL.values():
        assert float(estimator(pi, pi.clone())) == 0.0


def test_the_estimators_agree_in_expectation_on_a_small_distribution():
    """Under pi, k1 and k3 are unbiased for KL(pi || reference); the on-policy gradient of k2 is that of the KL."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.2, 0.4, -0.6], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    p = logp.detach().exp()
    kl = float((p * (logp.detach() - reference)).sum())
    for estimator in (k1, k3):
        assert float((p * estimator(logp.detach(), reference)).sum()) == pytest.approx(kl, rel=1e-12)
    (true,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    (second,) = torch.autograd.grad((p * k2(logp, reference)).sum(), logits, retain_graph=True)
    (first,) = torch.autograd.grad((p * k1(logp, reference)).sum(), logits)
    torch.testing.assert_close(second, true, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(first, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
