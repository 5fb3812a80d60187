"""`algorithm.truncated_sampling`: samples of the truncated distribution, ratios and log-probs of the whole one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlvr.errors import ConfigError
from small_run import changed, weights

STILL = 1e-12
"""A learning rate that moves nothing that float32 shows."""


def truncated(algorithm=None, optim=None):
    """A step of a small run with a nucleus of 0.6; each character more is worth a little, so that rewards differ."""
    return {
        "run": {"steps": 1},
        "rollout": {"top_p": 0.6, "temperature": 0.8},
        "rewards": ["verdict", {"name": "length", "per": 3}],
        "algorithm": {"truncated_sampling": True, "correction": None, **(algorithm or {})},
        "optim": {"lr": STILL, **(optim or {})},
    }


def distributions(trainer, rollout):
    """The probabilities at each sampled token of a rollout, at the temperature: a plain pass of the model."""
    with torch.no_grad():
        logits = trainer.policy.model(torch.tensor(rollout.token_ids)[None]).logits[0].double() / 0.8
    return [logits[place - 1].softmax(-1).numpy() for place in np.flatnonzero(rollout.sampled)]


def nucleus(probabilities, p):
    """The smallest set of most likely tokens that holds p (Holtzman et al. 2020)."""
    kept, held = [], 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        kept.append(int(token))
        held += probabilities[token]
        if held >= p:
            break
    return kept, held


def test_the_engine_samples_the_nucleus_and_gives_its_log_probs(make_trainer):
    trainer = make_trainer(truncated())
    trainer.train()
    left_out = 0
    for rollout in trainer.batch.rollouts:
        logprobs = rollout.behaviour_logprobs[rollout.sampled]
        for token, own, whole in zip(
            rollout.token_ids[rollout.sampled], logprobs, distributions(trainer, rollout), strict=True
        ):
            kept, held = nucleus(whole, 0.6)
            assert token in kept
            assert own == pytest.approx(np.log(whole[token] / held), abs=1e-4)
            left_out += len(kept) < len(whole)
    assert left_out
    # What is measured as the gap of the engine is the probability that was kept.
    assert trainer.metrics[0]["mismatch/mean"] > 0.01


def test_the_ratio_is_that_of_the_whole_distribution(make_trainer):
    """In the first optimizer step it is 1, so that the clipped loss has the gradient of REINFORCE. A ratio to the
    truncated distribution would be the probability that was kept, from 0.6 to 1."""
    after = []
    for loss in ("clip", "reinforce"):
        trainer = make_trainer(truncated({"loss": {"name": loss}}, {"lr": 1e-2}), name=loss)
        before = weights(trainer)
        trainer.train()
        after.append(weights(trainer))
        assert changed(before, after[-1])
    for name, value in after[0].items():
        torch.testing.assert_close(value, after[1][name], rtol=1e-4, atol=1e-6)


def test_later_updates_compare_with_the_policy_before_the_first(make_trainer):
    trainer = make_trainer(truncated({"decoupled": True}, {"updates_per_batch": 2}))
    (row,) = trainer.train()
    assert row["update/steps"] == 2
    # Nothing has moved: a ratio to the truncated distribution would be below 0.8 at many tokens.
    assert row["ratio/mean"] == pytest.approx(1, abs=1e-5)


LIKELY = {"name": "likelihood", "weight": 0.1}
GATED = {"name": "gate", "by": "verdict", "term": "likelihood"}


@pytest.mark.parametrize(
    ("rewards", "algorithm", "problem"),
    [
        (["verdict", LIKELY], {}, "rollout.top_p=0.6: .* and rewards: 'likelihood' reads them: sample without"),
        ([GATED], {}, "rewards: '.*likelihood' reads them"),
        (
            ["verdict"],
            {"modifiers": ["clip", "surprise"]},
            "algorithm.modifiers: 'surprise' reads them: .* leave it out",
        ),
    ],
    ids=str,
)
def test_rewards_and_advantages_of_the_engine_s_log_probs_are_refused(make_trainer, rewards, algorithm, problem):
    """`surprise` and `likelihood` would read the probability in the nucleus, 1 for a nucleus of one token."""
    tree = {**truncated(algorithm), "rewards": rewards}
    with pytest.raises(ConfigError, match=problem):
        make_trainer(tree)
    # Without truncation they are the policy's own.
    tree["rollout"] = {"temperature": 0.8}
    tree["algorithm"] |= {"truncated_sampling": False}
    assert make_trainer(tree).train()


@pytest.mark.parametrize(("rollout", "refused"), [({}, True), ({"min_p": 0.1}, False), ({"top_k": 3}, False)], ids=str)
def test_the_option_without_a_truncation_is_refused(make_trainer, rollout, refused):
    tree = {"rollout": rollout, "algorithm": {"truncated_sampling": True, "correction": None}}
    if not refused:
        make_trainer(tree)
        return
    with pytest.raises(ConfigError, match="none is set: set one of them or truncated_sampling to false"):
        make_trainer(tree)


@pytest.mark.parametrize(
    ("algorithm", "optim", "problem"),
    [
        ({"truncated_sampling": False}, {}, "algorithm.truncated_sampling to true to accept the bias"),
        ({"correction": "truncate"}, {}, "algorithm.correction would take the truncation .*set it to null"),
        ({"correction": "auto"}, {}, "set it to null"),
        ({"loss": "topr"}, {}, "the loss of 'policy' reads them: sample without truncation"),
        ({}, {"updates_per_batch": 2}, "set algorithm.decoupled to true"),
        ({}, {"epochs_per_batch": 2}, "set algorithm.decoupled to true"),
    ],
    ids=str,
)
def test_what_would_compare_with_the_truncated_distribution_is_refused(make_trainer, algorithm, optim, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer(truncated(algorithm, optim))
