"""ROVER: the loss of the random policy's value against finite differences, and the policy that it recalls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner_steps import component
from loss_cases import Case, value_and_gradient
from number_oracles import finite_differences, gap
from rlvr.core.needs import CURRENT, PROXIMAL
from rlvr.losses import Objective, Reinforce
from rlvr.recipes.rover.rover import RandomPolicyValueLoss

AVERAGES = ("tokens", "sequences", "constant")


@pytest.mark.parametrize("average", AVERAGES)
def test_rover(average):
    case = Case(9)
    rng = np.random.default_rng(1)
    means = {model: (rng.normal(0, 1, len(case.sequence)), rng.normal(9, 1, len(case.sequence))) for model in "cp"}
    targets = np.zeros(len(case.sequence))
    for s in range(case.S):
        where = np.flatnonzero(case.sequence == s)
        for t, following in zip(where, [*where[1:], None], strict=True):
            change = 0.0
            if following is not None:
                now, before = (means[m][0][following] - means[m][1][following] for m in "cp")
                change = now - before
            targets[t] = case.advantage[t] + 0.5 * 1.5 * change

    def wanted(x):
        return case.average((1.5 * (x - case.proximal) - targets) ** 2, average)

    tokens = case.batch()
    for model, key in ((CURRENT, "c"), (PROXIMAL, "p")):
        for name, values in zip(("mean_logit", "logsumexp"), means[key], strict=True):
            tokens.statistics[name, model] = torch.tensor(values)
    value, gradient = value_and_gradient(RandomPolicyValueLoss(1.5, 0.5, average), tokens, case.over())
    assert value == pytest.approx(wanted(case.logprobs), rel=1e-10)
    np.testing.assert_allclose(gradient, finite_differences(wanted, case.logprobs), rtol=1e-6, atol=1e-8)


def test_rover_recalls_the_policy_that_the_update_began_with(steps):
    """On later steps its ratio is to that policy, so while the policy stands still every step is the first one."""
    first, second = steps.gradients(Objective((component(RandomPolicyValueLoss()),)), epochs_per_batch=2)[0]
    assert gap(second, first) < 1e-5
    assert "mean_logit/proximal" in steps.batch.token_columns
    advantages = Objective((component(Reinforce()),))
    ours, plain = (steps.gradients(o)[0][0] for o in (Objective((component(RandomPolicyValueLoss()),)), advantages))
    assert gap(ours, 2 * plain) < 1e-5
