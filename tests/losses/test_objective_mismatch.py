"""The mismatch between trainer and engine is measured on rollouts without a gradient too, for one micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from number_oracles import double, token_statistics
from rlvr.config import OptimConfig
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, Objective, ObjectiveTerm, Truncate


def exact_batch(policy, make_batch, **options):
    """A batch (some groups mixed, flat or undecided) whose behaviour log-probs are the policy's own, and gaps put on
    them."""
    batch, model = make_batch(policy, **options), double(policy)
    rng = np.random.default_rng(3)
    for rollout in batch.rollouts:
        with torch.no_grad():
            own = token_statistics(model, rollout)[0].numpy()
        written = rollout.sampled
        rollout.behaviour_logprobs[written] = own[written[1:]] + rng.normal(0, 0.3, int(written.sum()))
    batch.gaps = [
        token_statistics(model, r)[0].detach().numpy()[r.sampled[1:]] - r.behaviour_logprobs[r.sampled]
        for r in batch.rollouts
    ]
    return batch


COMPONENT = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", zero_without_advantage=True, corrected=True)


@pytest.mark.parametrize("correction", [None, Truncate()])
@pytest.mark.parametrize("epochs", [1, 2])
def test_both_kinds_count_by_their_tokens(policy, make_batch, recording, forwards, correction, epochs):
    """Where all rollouts are measured the mismatch is the mean over all sampled tokens, by float64."""
    batch = exact_batch(policy, make_batch)
    backend = recording(policy, moves=False)
    options = OptimConfig(optimizer="sgd", lr=1.0, epochs_per_batch=epochs)
    metrics = Learner(backend).update(batch, Objective((COMPONENT,), 1.0, correction), options, 1.0)
    gaps = np.concatenate(batch.gaps)
    ratios = np.exp(gaps)
    assert metrics["mismatch/mean"] == pytest.approx(np.abs(gaps).mean(), rel=1e-4)
    assert metrics["mismatch/max"] == pytest.approx(np.abs(gaps).max(), rel=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx((ratios - 1 - gaps).mean(), rel=1e-3)
    assert metrics["mismatch/effective"] == pytest.approx(ratios.sum() ** 2 / (len(gaps) * (ratios**2).sum()), rel=1e-4)
    flat = len(batch) - int((batch.columns["advantage"] != 0).sum())
    assert flat > 0
    extra = [n for n, with_gradient in forwards if not with_gradient]
    assert extra == ([flat] if correction is None or epochs == 1 else [len(batch) - flat, flat])


@pytest.mark.parametrize(
    ("cut", "most"), [({}, 8), ({"micro_batch_size": 2}, 2), ({"micro_batch_tokens": 24}, 7), ({"packing": False}, 8)]
)
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_wrong_log_prob_in_a_flat_group_is_seen_for_one_micro_batch(
    policy, make_batch, recording, forwards, cut, most, lockstep
):
    """Twelve flat groups: the extra pass is one micro-batch, of as many groups as it has rollouts."""
    batch = exact_batch(policy, make_batch, rewards=((1.0, 0.0), *((1.0, 1.0),) * 12))
    options = OptimConfig(optimizer="sgd", lr=1.0, **cut)

    def measured():
        backend = recording(policy, moves=False)
        backend.lockstep = lockstep
        forwards.clear()
        metrics = Learner(backend).update(batch, Objective((COMPONENT,)), options, 1.0)
        extra = [n for n, with_gradient in forwards if not with_gradient]
        assert len(extra) == 1 and 1 <= extra[0] <= most
        return metrics["mismatch/max"]

    before = measured()
    flat = [rollout for rollout in batch.rollouts if rollout.group != "g0"]
    first = min(flat, key=lambda rollout: rollout.token_ids.tobytes())  # in whichever order, this one is measured
    first.behaviour_logprobs[first.sampled] -= 7.0
    assert before < 3 < measured()


def test_a_sample_stands_for_all_rollouts_without_a_gradient(policy, make_batch, recording):
    """Flat groups have a gap of 1 at every token, mixed ones none: the mean is the share of flat tokens, however few
    are measured."""
    batch = exact_batch(policy, make_batch, rewards=((1.0, 0.0), (0.0, 1.0), *((1.0, 1.0),) * 10))
    tokens = {True: 0, False: 0}
    for rollout, gaps, advantage in zip(batch.rollouts, batch.gaps, batch.columns["advantage"], strict=True):
        flat = bool(advantage == 0)
        rollout.behaviour_logprobs[rollout.sampled] += (gaps - (1.0 if flat else 0.0)).astype(np.float32)
        tokens[flat] += int(rollout.sampled.sum())
    for options in ({}, {"micro_batch_size": 1}):
        config = OptimConfig(optimizer="sgd", lr=1.0, **options)
        metrics = Learner(recording(policy, moves=False)).update(batch, Objective((COMPONENT,)), config, 1.0)
        assert metrics["mismatch/mean"] == pytest.approx(tokens[True] / sum(tokens.values()), rel=1e-4)
