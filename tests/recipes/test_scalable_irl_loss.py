"""Scalable IRL: the loss of inverse soft Q-learning against the float64 model, and a stage of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner_steps import CUTS
from number_oracles import gap, gradient_of
from rlvr.losses import LikelihoodLoss, Objective, ObjectiveTerm
from rlvr.recipes.scalable_irl.inverse_soft_q import InverseSoftQ
from small_run import changed, weights


def implied(steps, penalty, discount):
    """The loss of inverse soft Q-learning over all decided tokens, from the float64 model's own logits."""
    total, count = 0.0, 0.0
    for rollout, weight in zip(steps.batch.rollouts, steps.batch.token_columns["weight/policy"], strict=True):
        logits = steps.model(input_ids=torch.as_tensor(rollout.token_ids)[None]).logits[0, :-1].double()
        logits = logits / rollout.temperature
        places = np.flatnonzero(weight[1:])
        for k, t in enumerate(places):
            q, v = logits[t, rollout.token_ids[t + 1]], torch.logsumexp(logits[t], 0)
            following = torch.logsumexp(logits[places[k + 1]], 0) if k + 1 < len(places) else 0.0
            total = total + (v - q) + penalty * (q - discount * following) ** 2
            count += 1
    return total / count


@pytest.mark.parametrize(("penalty", "discount"), [(0.3, 0.9), (1.0, 1.0), (0.2, 0.0)])
def test_inverse_soft_q_is_that_of_the_float64_model(steps, penalty, discount):
    value = implied(steps, penalty, discount)
    want = gradient_of(steps.model, value)
    objective = Objective((ObjectiveTerm("td", InverseSoftQ(penalty, discount), "policy"),))
    for options in CUTS:
        (gradient,), metrics = steps.gradients(objective, **options)
        assert gap(gradient, want) < 1e-5, options
        assert metrics["loss/td"] == pytest.approx(float(value.detach()), rel=1e-5)


def test_inverse_soft_q_without_a_penalty_is_the_likelihood(steps):
    plain = steps.gradients(Objective((ObjectiveTerm("td", LikelihoodLoss(), "policy"),)))[0][0]
    own = steps.gradients(Objective((ObjectiveTerm("td", InverseSoftQ(0.0), "policy"),)))[0][0]
    assert gap(own, plain) < 1e-6


def test_inverse_soft_q_in_a_stage_of_its_own(make_trainer):
    trainer = make_trainer({"stages": [{"kind": "sft", "loss": {"name": "inverse_soft_q", "penalty": 0.1}}]})
    before = weights(trainer)
    trainer.train(3)
    assert changed(before, weights(trainer))
    assert trainer.metrics[2]["loss/inverse_soft_q"] < trainer.metrics[0]["loss/inverse_soft_q"]
    assert trainer.metrics[0]["loss/implied_reward"] is not None


def test_a_penalty_of_nothing_is_the_plain_stage(make_trainer):
    result = []
    for name, loss in (("plain", "likelihood"), ("none", {"name": "inverse_soft_q", "penalty": 0.0})):
        trainer = make_trainer({"stages": [{"kind": "sft", "loss": loss}]}, name)
        trainer.train(3)
        result.append(weights(trainer))
    assert max(float((result[0][k] - result[1][k]).abs().max()) for k in result[0]) < 1e-6
