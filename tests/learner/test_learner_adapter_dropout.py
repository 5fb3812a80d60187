"""An adapter's dropout changes the gradient of an update and none of the numbers that losses compare."""

from __future__ import annotations

import pytest
import torch

from rlvr import registry
from rlvr.config import OptimConfig
from rlvr.distributed.plain import PlainBackend
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, Objective, ObjectiveTerm, Truncate

TWICE = OptimConfig(optimizer="sgd", lr=1.0, max_grad_norm=1e9, epochs_per_batch=2)


@pytest.fixture
def make_noisy(make_policy):
    """A function that builds a policy, nothing of which was computed, with an adapter that is not fresh and has
    dropout."""

    def make(dropout=0.5):
        policy = make_policy(adapter={"r": 4, "alpha": 64, "dropout": dropout}, tie_word_embeddings=False)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in policy.trainable().items():
                if "lora_B" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return policy

    return make


def test_the_passes_of_a_first_update_are_without_dropout(make_noisy, make_batch):
    """The pass over the batch is the first thing that the policy computes, and finds out meanwhile what the model can
    do."""
    policy = make_noisy()
    target = Objective((ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True),), 11.0, Truncate())
    torch.manual_seed(0)
    metrics = Learner(PlainBackend(policy, "sgd")).update(make_batch(policy), target, TWICE, 0.0)
    assert metrics["ratio/max"] == metrics["ratio/mean"] == 1.0


def test_what_a_loss_compares_beside_log_probs_is_without_dropout(make_noisy, make_batch):
    """ROVER's target has the mean log-prob of the whole vocabulary, now and when the update began: 0 apart where the
    weights have not moved. So its value is that of an adapter without dropout."""
    result = {}
    for dropout in (0.0, 0.5):
        policy = make_noisy(dropout)
        target = Objective((ObjectiveTerm("policy", registry.build("loss", "rover"), "policy"),), 11.0)
        torch.manual_seed(0)
        result[dropout] = Learner(PlainBackend(policy, "sgd")).update(make_batch(policy), target, TWICE, 0.0)
    assert result[0.5]["loss/policy"] == pytest.approx(result[0.0]["loss/policy"], abs=1e-6)
    assert result[0.5]["grad_norm"] != pytest.approx(result[0.0]["grad_norm"], rel=1e-2)


def test_flags_of_nested_modes_are_as_they_were(make_noisy):
    policy = make_noisy()

    def on():
        return any(module.training for module in policy.model.modules())

    with policy.training():
        with policy.evaluating():
            with policy.evaluating():
                assert not on()
            assert not on()
            with policy.training():
                assert on()
            assert not on()
        assert on()
    assert not on()
