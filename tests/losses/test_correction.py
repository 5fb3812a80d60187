"""Off-policy corrections: their weights against worked cases, and the gradients that they make against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from number_oracles import double, gap, gradient_of, token_statistics, torch_averaged
from rlvr import registry
from rlvr.config import OptimConfig
from rlvr.core.needs import CURRENT
from rlvr.errors import ConfigError, TrainingError
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, Mask, MaskNegatives, Objective, ObjectiveTerm, Reject, TokenBatch, Truncate


def tokens_of(gaps, sequence=None):
    """A micro-batch whose proximal and current log-probs are `gaps` above the behaviour's."""
    behaviour = torch.linspace(-3.0, -0.5, len(gaps), dtype=torch.float64)
    sequence = [0] * len(gaps) if sequence is None else sequence
    ones = torch.ones(len(gaps), dtype=torch.float64)
    now = behaviour + torch.tensor(gaps, dtype=torch.float64)
    statistics = {("logprobs", CURRENT): now}
    return TokenBatch(
        sequence=torch.tensor(sequence),
        sequences=max(sequence) + 1,
        weight=ones,
        advantage=ones,
        proximal_logprobs=now,
        behaviour_logprobs=behaviour,
        statistics=statistics,
    )


def weights(correction, gaps, sequence=None):
    return correction(tokens_of(gaps, sequence)).tolist()


def test_truncation_by_hand():
    assert weights(Truncate(2.0), [0.0, math.log(1.5), math.log(3.0), math.log(0.1)]) == pytest.approx([1, 1.5, 2, 0.1])


def test_truncation_of_whole_responses_by_hand():
    # geometric means: sqrt(4 * 1) = 2, bounded by 1.5; and 1 / 3 of the lone token
    got = weights(Truncate(1.5, "sequence"), [math.log(4.0), 0.0, math.log(1 / 3)], [0, 0, 1])
    assert got == pytest.approx([1.5, 1.5, 1 / 3])


def test_the_mask_by_hand():
    got = weights(Mask(0.5, 5.0), [math.log(x) for x in (0.49, 0.51, 1.0, 4.9, 5.1)])
    assert got == pytest.approx([0, 0.51, 1, 4.9, 0])


def test_rejection_by_hand():
    # divergences: mean of 2 - 1 - log 2 = 0.307 and 0 -> 0.153; opposite gaps of 0.5: mean of e^.5 - 1.5, e^-.5 - .5 =
    # 0.128
    gaps, sequence = [math.log(2.0), 0.0, 0.5, -0.5, 0.01], [0, 0, 1, 1, 2]
    assert weights(Reject(0.14, 3.0), gaps, sequence) == pytest.approx(
        [0, 0, math.exp(0.5), math.exp(-0.5), math.exp(0.01)]
    )
    assert weights(Reject(0.2, 1.2), gaps, sequence)[:2] == pytest.approx([1.2, 1.0])
    assert weights(Reject(0.1), gaps, sequence)[:4] == [0, 0, 0, 0]


def test_masked_negatives_by_hand():
    tokens = tokens_of([-0.3, -0.1, -0.3, -0.1, -0.05, -0.05, 0.9], [0, 0, 1, 1, 2, 2, 3])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    tokens = replace(tokens, advantage=advantage)
    # means of behaviour - current: 0.2, 0.2, 0.05, -0.9; only the punished response beyond 0.1 is masked
    assert MaskNegatives(0.1, None)(tokens).tolist() == [1, 1, 0, 0, 1, 1, 1]
    assert MaskNegatives(0.1, 2.0)(tokens).tolist() == pytest.approx(
        [math.exp(-0.3), math.exp(-0.1), 0, 0, math.exp(-0.05), math.exp(-0.05), 2.0]
    )
    drifted = tokens_of([0.0, 0.0])
    drifted = replace(drifted, advantage=-drifted.advantage)
    drifted.statistics["logprobs", CURRENT] = drifted.behaviour_logprobs - 0.2  # since the update began
    assert MaskNegatives(0.1, None)(drifted).tolist() == [0, 0]


@pytest.mark.parametrize("name", registry.names("correction"))
@given(gaps=st.lists(st.floats(-60, 60), min_size=1, max_size=12), data=st.data())
def test_every_correction(name, gaps, data):
    """Weights are bounded, need no other response, and are 1 where the policies agree."""
    correction = registry.build("correction", name)
    sequence = sorted(data.draw(st.lists(st.integers(0, 2), min_size=len(gaps), max_size=len(gaps))))
    together = correction(tokens_of(gaps, sequence))
    assert bool((together >= 0).all()) and bool((together <= 5.0 + 1e-9).all())
    for number in set(sequence):
        mine = [i for i, s in enumerate(sequence) if s == number]
        alone = correction(tokens_of([gaps[i] for i in mine]))
        assert torch.allclose(together[mine], alone)
    assert weights(correction, [0.0] * len(gaps), sequence) == [1.0] * len(gaps)


@pytest.mark.parametrize(
    ("piece", "options"),
    [("truncate", {"cap": 0.5}), ("mask", {"low": 1.1}), ("reject", {"max_kl": 0}), ("mask_negatives", {"cap": 0.5})],
)
def test_bounds_that_would_touch_honest_tokens_are_refused(piece, options):
    with pytest.raises(ConfigError, match=r"1|above 0"):
        registry.build("correction", {"name": piece, **options})


# In the learner ------------------------------------------------------------------------------------------------------


class Recorded:
    """Behaviour log-probs of a batch that a moved policy would have given, as a float64 oracle reads them."""

    def __init__(self, policy, batch, seed=0, size=0.6):
        rng, self.model, self.batch = np.random.default_rng(seed), double(policy), batch
        self.now = [token_statistics(self.model, r)[0] for r in batch.rollouts]
        for rollout, now in zip(batch.rollouts, self.now, strict=True):
            trained = rollout.sampled
            noise = rng.normal(0, size, int(trained.sum()))
            rollout.behaviour_logprobs[trained] = now.detach().numpy()[trained[1:]] + noise

    def loss(self, average, weight_of, constant=11.0):
        """-mean of w A log pi, the weights from `weight_of(ratios of one response)`."""
        values, weights = [], []
        for i, (rollout, now) in enumerate(zip(self.batch.rollouts, self.now, strict=True)):
            weight = torch.as_tensor(self.batch.token_columns["weight/policy"][i][1:]).double()
            ratios = (now.detach() - torch.as_tensor(rollout.behaviour_logprobs[1:]).double()).exp()
            on = weight > 0
            importance = torch.zeros_like(ratios)
            if bool(on.any()):
                importance[on] = torch.tensor(weight_of(ratios[on].tolist()), dtype=torch.float64)
            values.append(-importance * float(self.batch.columns["advantage"][i]) * now)
            weights.append(weight)
        return torch_averaged(values, weights, average, constant)


def geometric(ratios):
    return math.prod(ratios) ** (1 / len(ratios))


ORACLES = {
    "none": (None, lambda ratios: [1.0] * len(ratios)),
    "truncate": (Truncate(1.3), lambda ratios: [min(r, 1.3) for r in ratios]),
    "whole": (Truncate(1.1, "sequence"), lambda ratios: [min(geometric(ratios), 1.1)] * len(ratios)),
    "mask": (Mask(0.7, 1.6), lambda ratios: [r if 0.7 <= r <= 1.6 else 0.0 for r in ratios]),
    "reject": (
        Reject(0.2, 1.5),
        lambda ratios: [
            min(r, 1.5) if sum(x - 1 - math.log(x) for x in ratios) / len(ratios) <= 0.2 else 0.0 for r in ratios
        ],
    ),
}


@pytest.mark.parametrize("average", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize("name", ORACLES)
def test_the_corrected_gradient_is_that_of_float64_however_it_is_cut(policy, make_batch, recording, name, average):
    batch = make_batch(policy)
    recorded = Recorded(policy, batch)
    correction, weight_of = ORACLES[name]
    want = gradient_of(recorded.model, recorded.loss(average, weight_of))
    component = ObjectiveTerm(
        "policy", ClippedPolicyLoss(average=average), "policy", zero_without_advantage=True, corrected=True
    )
    for cut in ({}, {"micro_batch_size": 1}, {"micro_batch_tokens": 40}):
        backend = recording(policy, moves=False)
        options = OptimConfig(optimizer="sgd", lr=1.0, max_grad_norm=1e9, **cut)
        metrics = Learner(backend).update(batch, Objective((component,), 11.0, correction), options, 1.0)
        assert gap(backend.gradients[0], want) < 1e-5
        assert metrics["ratio/mean"] == pytest.approx(1.0)
        assert (metrics.get("correction/weight") is None) == (correction is None)


def test_the_effective_sample_size_and_the_touched_share_by_hand(policy, make_batch, recording):
    batch = make_batch(policy)
    recorded = Recorded(policy, batch)
    component = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True)
    metrics = Learner(recording(policy, moves=False)).update(
        batch, Objective((component,), 1.0, Truncate(1.3)), OptimConfig(optimizer="sgd", lr=1.0), 1.0
    )

    def ratios(weighs):
        return [
            math.exp(float(now[t].detach()) - float(rollout.behaviour_logprobs[t + 1]))
            for i, (rollout, now) in enumerate(zip(batch.rollouts, recorded.now, strict=True))
            for t in range(len(now))
            if rollout.sampled[t + 1] and (not weighs or batch.token_columns["weight/policy"][i][t + 1] > 0)
        ]

    sampled, trained = ratios(False), ratios(True)
    assert len(sampled) > len(trained)
    effective = sum(sampled) ** 2 / (len(sampled) * sum(r * r for r in sampled))
    assert metrics["mismatch/effective"] == pytest.approx(effective, rel=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in sampled) / len(sampled), rel=1e-3)
    assert metrics["correction/touched"] == pytest.approx(sum(r > 1.3 for r in trained) / len(trained))
    assert metrics["correction/weight"] == pytest.approx(sum(min(r, 1.3) for r in trained) / len(trained), rel=1e-4)


def test_without_a_cap_only_what_is_masked_is_touched(policy, make_batch, recording):
    """mask_negatives with cap null weighs by 1, not by the ratio: with a bound that nothing passes no token is
    touched."""
    batch = make_batch(policy)
    component = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True)
    touched = []
    for max_kl in (1e9, 1e-6):
        objective = Objective((component,), 1.0, MaskNegatives(max_kl, None))
        metrics = Learner(recording(policy, moves=False)).update(
            batch, objective, OptimConfig(optimizer="sgd", lr=1.0), 1.0
        )
        touched.append(metrics["correction/touched"])
    assert touched[0] == 0 and 0 < 1 - metrics["correction/weight"] == pytest.approx(touched[1])


def test_unknown_behaviour_log_probs_cannot_be_corrected(policy, make_batch, recording):
    batch = make_batch(policy)
    trained = next(r for i, r in enumerate(batch.rollouts) if batch.token_columns["weight/policy"][i].any())
    trained.behaviour_logprobs[:] = np.nan
    component = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True)
    learner, options = Learner(recording(policy)), OptimConfig(optimizer="sgd", lr=1.0)
    with pytest.raises(TrainingError, match="correction null"):
        learner.update(batch, Objective((component,), 1.0, Truncate()), options, 1.0)
    learner.update(batch, Objective((component,), 1.0), options, 1.0)


# The decoupled objective ---------------------------------------------------------------------------------------------


def second_gradient(policy, batch, recording, decoupled):
    """(gradient of the second of two epochs, its float64 model, the first model)"""
    backend = recording(policy)
    before = double(policy)
    component = ObjectiveTerm("policy", ClippedPolicyLoss(1.0, 10.0, "tokens"), "policy", corrected=True)
    options = OptimConfig(optimizer="sgd", lr=0.02, max_grad_norm=1e9, epochs_per_batch=2)
    after = {}
    step = backend.step

    def stepping(lr, norm):
        result = step(lr, norm)
        after.setdefault("model", double(policy))
        return result

    backend.step = stepping
    metrics = Learner(backend).update(batch, Objective((component,), 1.0, None, decoupled), options, 0.02)
    return backend.gradients[1], after["model"], before, metrics


@pytest.mark.parametrize("decoupled", [True, False])
def test_later_steps_take_their_ratio_to_the_proximal_policy_when_decoupled(policy, make_batch, recording, decoupled):
    """Without a correction: -A pi / prox, with prox the weights before the first step; else -A pi / behaviour."""
    batch = make_batch(policy)
    Recorded(policy, batch, size=0.4)
    got, model, first, metrics = second_gradient(policy, batch, recording, decoupled)
    values, weights = [], []
    for i, rollout in enumerate(batch.rollouts):
        weight = torch.as_tensor(batch.token_columns["weight/policy"][i][1:]).double()
        now, _ = token_statistics(model, rollout)
        behaviour = torch.where(weight > 0, torch.as_tensor(rollout.behaviour_logprobs[1:]).double(), now.detach())
        prox = token_statistics(first, rollout)[0].detach() if decoupled else behaviour
        values.append(-(now - prox).exp() * float(batch.columns["advantage"][i]))
        weights.append(weight)
    assert gap(got, gradient_of(model, torch_averaged(values, weights, "tokens", 1.0))) < 1e-4
    assert ("logprobs/proximal" in batch.token_columns) == decoupled
    assert metrics["ratio/mean"] != pytest.approx(1.0, abs=1e-7)


def test_one_optimizer_step_needs_no_extra_pass(policy, make_batch, recording):
    batch = make_batch(policy)
    component = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True)
    options = OptimConfig(optimizer="sgd", lr=1.0)
    Learner(recording(policy)).update(batch, Objective((component,), 1.0, None, decoupled=True), options, 1.0)
    assert "logprobs/proximal" not in batch.token_columns


@pytest.mark.parametrize("parts", [2, 3])
def test_only_the_rollouts_of_later_steps_are_passed_again(policy, make_batch, recording, parts):
    batch = make_batch(policy)
    component = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True)
    options = OptimConfig(optimizer="sgd", lr=1e-3, updates_per_batch=parts)
    Learner(recording(policy)).update(batch, Objective((component,), 1.0, None, decoupled=True), options, 1e-3)
    known = [bool(np.isfinite(values).any()) for values in batch.token_columns["logprobs/proximal"]]
    first_part = np.array_split(np.arange(batch.group_index().max() + 1), parts)[0]
    for index, is_known in enumerate(known):
        if batch.group_index()[index] in first_part:
            assert not is_known
    assert any(known)


# Several optimizer steps of a batch -----------------------------------------------------------------------------------


def two_steps(policy, batch, recording, objective, moments):
    """(backend, learner's metrics, the model before each of the two steps as float64 copies, rollouts of each step)"""
    backend, before = recording(policy), [double(policy)]
    step = backend.step

    def stepping(lr, norm):
        result = step(lr, norm)
        before.append(double(policy))
        return result

    backend.step = stepping
    options = OptimConfig(optimizer="sgd", lr=0.02, max_grad_norm=1e9, **{moments: 2})
    metrics = Learner(backend).update(batch, objective, options, 0.02)
    everyone = np.arange(len(batch))
    halves = np.array_split(np.unique(batch.group_index()), 2)
    cut = [np.flatnonzero(np.isin(batch.group_index(), half)) for half in halves]
    return backend, metrics, before, [everyone, everyone] if moments == "epochs_per_batch" else cut


def masked_negatives(ratios, drift, advantage):
    """mask_negatives with a bound of 0.1 and a cap of 1.5; `drift` is the mean of log behaviour - log pi."""
    return [0.0 if drift > 0.1 and advantage < 0 else min(r, 1.5) for r in ratios]


STEP_ORACLES = {name: (piece, lambda r, d, a, of=of: of(r)) for name, (piece, of) in ORACLES.items() if piece} | {
    "mask_negatives": (MaskNegatives(0.1, 1.5), masked_negatives)
}


@pytest.mark.parametrize("moments", ["epochs_per_batch", "updates_per_batch"])
@pytest.mark.parametrize("name", STEP_ORACLES)
def test_every_step_weighs_and_clips(policy, make_batch, recording, name, moments):
    """-w min(rho A, clip(rho) A) in both steps: rho = pi / pi before the update, w of (pi before the update) /
    behaviour.

    As in TRL and verl. Nothing is asked of the objective but the correction.
    """
    batch = make_batch(policy)
    Recorded(policy, batch, size=0.4)
    correction, weight_of = STEP_ORACLES[name]
    component = ObjectiveTerm("policy", ClippedPolicyLoss(0.05, 0.08, "sequences"), "policy", corrected=True)
    target = Objective((component,), 1.0, correction)
    backend, metrics, models, parts = two_steps(policy, batch, recording, target, moments)
    start, touched, importances = models[0], [], []
    for step, (model, part) in enumerate(zip(models, parts, strict=False)):
        values, weights = [], []
        for i in part:
            rollout, advantage = batch.rollouts[i], float(batch.columns["advantage"][i])
            weight = torch.as_tensor(batch.token_columns["weight/policy"][i][1:]).double()
            now, proximal = token_statistics(model, rollout)[0], token_statistics(start, rollout)[0].detach()
            rho, importance, on = (now - proximal).exp(), torch.zeros_like(proximal), weight > 0
            behaviour = torch.as_tensor(rollout.behaviour_logprobs[1:]).double()
            if bool(on.any()):
                ratios = (proximal - behaviour).exp()[on].tolist()
                drift = float((behaviour - now.detach())[on].mean())
                importance[on] = torch.tensor(weight_of(ratios, drift, advantage), dtype=torch.float64)
                importances.extend(importance[on].tolist())
                plain = geometric(ratios) if name == "whole" else (proximal - behaviour).exp()[on]
                touched.extend((importance[on] - plain).abs().gt(1e-12).tolist())
            values.append(-importance * torch.minimum(rho * advantage, rho.clip(0.95, 1.08) * advantage))
            weights.append(weight)
        want = gradient_of(model, torch_averaged(values, weights, "sequences", 1.0))
        assert gap(backend.gradients[step], want) < 1e-4, step
    assert metrics["correction/weight"] == pytest.approx(np.mean(importances), rel=1e-4)
    assert metrics["correction/touched"] == pytest.approx(np.mean(touched))
    sizes = [  # of undecided rollouts too, which have no gradient
        (token_statistics(start, r)[0].detach() - torch.as_tensor(r.behaviour_logprobs[1:]))[r.sampled[1:]].abs()
        for r in batch.rollouts
    ]
    assert metrics["mismatch/mean"] == pytest.approx(float(torch.cat(sizes).mean()), rel=1e-4)


@pytest.mark.parametrize("name", registry.names("correction"))
@pytest.mark.parametrize("gap_of_engine", [-6.0, 6.0])
def test_a_large_gap_of_the_engine_is_bounded_in_every_step(
    policy, make_batch, recording, monkeypatch, name, gap_of_engine
):
    """weight x ratio of a token stays within the correction's bound, for tokens of either sign, in all of three
    steps."""
    batch = make_batch(policy)
    Recorded(policy, batch, size=0.0)  # writes the behaviour log-probs
    for rollout in batch.rollouts:
        rollout.behaviour_logprobs[int(np.flatnonzero(rollout.sampled)[0])] += gap_of_engine
    seen = []
    plain = ClippedPolicyLoss.__call__

    def call(loss, tokens, over):
        ratio = (tokens.logprobs - tokens.proximal_logprobs).detach().exp()
        seen.append((float((tokens.importance * ratio).max()), float(ratio.max())))
        return plain(loss, tokens, over)

    monkeypatch.setattr(ClippedPolicyLoss, "__call__", call)
    component = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True)
    options = OptimConfig(optimizer="sgd", lr=1e-6, epochs_per_batch=3)
    target = Objective((component,), 1.0, registry.build("correction", name))
    Learner(recording(policy)).update(batch, target, options, 1e-6)
    bound = 5.0 if name == "mask" else 2.0
    assert len(seen) == 3
    assert all(product <= bound * 1.001 and ratio <= 1.001 for product, ratio in seen), seen


def test_the_recomputed_log_probs_cost_one_pass(policy, make_batch, recording, forwards):
    """A correction with four steps a batch computes the rollouts of the later three once more; without one nothing
    is."""
    batch = make_batch(policy, rewards=((1.0, 0.0),) * 4)
    Recorded(policy, batch, size=0.1)
    component = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", corrected=True)
    options = OptimConfig(optimizer="sgd", lr=1e-3, updates_per_batch=4)
    Learner(recording(policy)).update(batch, Objective((component,), 1.0, Truncate()), options, 1e-3)
    assert forwards == [(6, False)] + [(2, True)] * 4
    forwards.clear()
    Learner(recording(policy)).update(batch, Objective((component,), 1.0), options, 1e-3)
    assert forwards == [(2, True)] * 4


def test_a_loss_that_chooses_sees_the_same_ratio_as_it_trains(policy, make_batch, recording, monkeypatch):
    """m2po chooses by the ratio to the recomputed log-probs in the second step, not by the engine's gap."""
    from rlvr.losses import SecondMomentLoss

    batch = make_batch(policy)
    Recorded(policy, batch, size=2.0)
    shown = []
    plain = SecondMomentLoss.choose

    def choose(loss, tokens):
        shown.append(float((tokens.logprobs - tokens.proximal_logprobs).abs().max()))
        return plain(loss, tokens)

    monkeypatch.setattr(SecondMomentLoss, "choose", choose)
    component = ObjectiveTerm("policy", SecondMomentLoss(), "policy", corrected=True)
    options = OptimConfig(optimizer="sgd", lr=1e-5, epochs_per_batch=2)
    Learner(recording(policy)).update(batch, Objective((component,), 1.0, Truncate()), options, 1e-5)
    assert shown[0] == 0.0 and shown[1] < 0.01
