"""Losses that see the whole optimizer step: their formulas, and their gradients in the real learner however it is
cut."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loss_oracles as oracle
from learner_steps import CUTS, Steps, component
from number_oracles import finite_differences, gap, gradient_of, token_statistics
from rlvr.errors import TrainingError
from rlvr.losses import (
    DPO,
    IPO,
    KTO,
    ChosenLikelihood,
    ClipCovLoss,
    ClippedPolicyLoss,
    Divergence,
    GammaWeightedLoss,
    GeometricMeanLoss,
    KLCovLoss,
    KLPenalty,
    Objective,
    ObjectiveTerm,
    QuadraticPenaltyLoss,
    Reinforce,
    Renewal,
    SecondMomentLoss,
    TopEntropy,
    WeightedLikelihood,
    k1,
    k2,
    k3,
)
from rlvr.recipes.copg.copg import ContrastiveLoss
from rlvr.recipes.for_.trajectory_balance import TrajectoryBalance
from rlvr.recipes.implicit_prm.outcome_classifier import OutcomeClassifier
from rlvr.recipes.laser.last_token_loss import LastTokenReward
from rlvr.recipes.pacs.pacs import RewardClassification
from rlvr.recipes.rover.rover import RandomPolicyValueLoss
from rlvr.recipes.scalable_irl.inverse_soft_q import InverseSoftQ
from rlvr.recipes.topr.topr import TaperedLoss
from sequence_cases import as_batch, responses


def zero_point(s):
    return max(0.0, float(np.mean(s.logprobs - s.reference)))


OF_RESPONSES = {
    "pacs": (RewardClassification(0.7), lambda x, s: oracle.pacs(x, s, 0.7)),
    "pacs, not balanced": (RewardClassification(1.3, False), lambda x, s: oracle.pacs(x, s, 1.3, False)),
    "copg": (ContrastiveLoss(0.3), lambda x, s: oracle.copg(x, s, 0.3)),
    "dpo": (DPO(0.4), lambda x, s: oracle.preference(x, s, "dpo", 0.4, "all")),
    "dpo, extremes": (DPO(0.4, "extremes"), lambda x, s: oracle.preference(x, s, "dpo", 0.4, "extremes")),
    "dpo, smoothed": (DPO(0.4, smoothing=0.1), lambda x, s: oracle.preference(x, s, "dpo", 0.4, "all", 0.1)),
    "ipo": (IPO(0.4), lambda x, s: oracle.preference(x, s, "ipo", 0.4, "all")),
    "trajectory balance": (TrajectoryBalance(100.0, 1e-3), lambda x, s: oracle.balance(x, s, 100.0, 1e-3)),
    "last token": (LastTokenReward("~", 0.2, -9.0), lambda x, s: oracle.self_score(x, s, 0.2, -9.0, True)),
    "last token, not balanced": (
        LastTokenReward("~", 0.3, -7.0, False),
        lambda x, s: oracle.self_score(x, s, 0.3, -7.0, False),
    ),
    "outcome": (OutcomeClassifier(0.6), lambda x, s: oracle.outcome(x, s, 0.6)),
    "kto": (KTO(0.4, right=1.5, wrong=0.7), lambda x, s: oracle.kto(x, s, 0.4, zero_point(s), 1.5, 0.7)),
}


ABSOLUTE = (TrajectoryBalance, LastTokenReward, OutcomeClassifier)
"""Losses that have a gradient where all rewards of a group are the same."""


@pytest.mark.parametrize("name", OF_RESPONSES)
@pytest.mark.parametrize("seed", range(3))
def test_losses_of_responses(name, seed):
    loss, wanted = OF_RESPONSES[name]
    s = responses(seed)
    batch = as_batch(s)
    value = loss.sequence_losses(batch).sum()
    (gradient,) = torch.autograd.grad(value, batch.logprobs)
    assert float(value.detach()) == pytest.approx(wanted(s.logprobs, s), rel=1e-10)
    numeric = finite_differences(lambda x: wanted(x, s), s.logprobs)
    np.testing.assert_allclose(gradient.numpy(), numeric, rtol=1e-6, atol=1e-8)
    assert np.abs(numeric).max() > 1e-3


@pytest.mark.parametrize("name", OF_RESPONSES)
def test_groups_that_compare_nothing(name):
    """A group of one, or of equal rewards: a finite loss; pairs have no gradient there. No response at all: 0."""
    loss, _ = OF_RESPONSES[name]
    for groups, rewards in (([0, 1], [1.0, 0.0]), ([0, 0, 0], [1.0, 1.0, 1.0]), ([], [])):
        batch = as_batch(responses(0, rewards, groups))
        shares = loss.sequence_losses(batch)
        assert bool(shares.isfinite().all())
        (gradient,) = torch.autograd.grad(shares.sum(), batch.logprobs, allow_unused=True)
        if not isinstance(loss, (KTO, RewardClassification, ContrastiveLoss, *ABSOLUTE)):
            assert gradient is None or not gradient.any()
        if isinstance(loss, (RewardClassification, ContrastiveLoss, TrajectoryBalance)) and groups == [0, 1]:
            assert not gradient.any()


def test_hundreds_of_members_and_huge_log_ratios():
    rng = np.random.default_rng(0)
    s = responses(0, rng.integers(0, 2, 600).astype(float).tolist(), [0] * 300 + [1] * 300)
    s.proximal = s.logprobs + rng.choice([-3e4, 3e4, 0.0], 600)
    s.reference = s.proximal
    for loss, _ in OF_RESPONSES.values():
        batch = as_batch(s)
        shares = loss.sequence_losses(batch)
        (gradient,) = torch.autograd.grad(shares.sum(), batch.logprobs)
        assert bool(shares.isfinite().all()) and bool(gradient.isfinite().all())


def test_neutral_settings():
    """DPO at a flat sigmoid is half beta times the contrast of the pairs."""
    s = responses(1, [1.0, 0.0, 0.3, 0.9], [0, 0, 0, 0])
    batch = as_batch(s)
    (flat,) = torch.autograd.grad(DPO(1e-7).sequence_losses(batch).sum(), batch.logprobs)
    wins = [sum(a > b for b in s.reward) - sum(a < b for b in s.reward) for a in s.reward]
    np.testing.assert_allclose(flat.numpy(), -0.5e-7 * np.asarray(wins) / 6, rtol=1e-5)


@pytest.mark.parametrize("loss", [RewardClassification(), OutcomeClassifier(), TrajectoryBalance()], ids=str)
def test_rewards_that_are_no_probabilities_are_refused(loss):
    with pytest.raises(ValueError, match=r"within \[0, 1\]|at least 0"):
        loss.sequence_losses(as_batch(responses(0, [1.0, -0.5], [0, 0])))


# In the learner ------------------------------------------------------------------------------------------------------


OBJECTIVES = {
    **{
        f"clip {o}": (component(ClippedPolicyLoss(average=a, **o)),)
        for a, o in (
            ("sequences", {"ratio": "geometric"}),
            ("constant", {"ratio": "sequence", "bound": 5.0}),
            ("sequences", {"ratio": "geometric_token"}),
            ("tokens", {"clip": "soft"}),
            ("tokens", {"clip": "detach"}),
            ("tokens", {"clip": "tv"}),
            ("sequences", {"clip": "kl", "cap": 3.0}),
        )
    },
    **{
        type(loss).__name__: (component(loss),)
        for loss in (
            Reinforce(),
            GeometricMeanLoss(),
            GammaWeightedLoss(),
            QuadraticPenaltyLoss(),
            TaperedLoss(),
            WeightedLikelihood(),
            RandomPolicyValueLoss(),
            ClipCovLoss(0.2, 0.0),
            KLCovLoss(0.2),
            SecondMomentLoss(0.02),
            RewardClassification(),
            ContrastiveLoss(),
            TrajectoryBalance(),
            Reinforce(average="groups"),
        )
    },
    "inverse soft q": (component(ClippedPolicyLoss()), ObjectiveTerm("td", InverseSoftQ(0.2, 0.9), "policy", 0.5)),
    "outcome": (component(ClippedPolicyLoss()), ObjectiveTerm("outcome", OutcomeClassifier(), "policy", 0.5)),
    "kl by token": (
        component(ClippedPolicyLoss()),
        ObjectiveTerm("kl", KLPenalty(k3, "tokens"), "policy", 0.5, by_token=True),
    ),
    "top entropy": (component(ClippedPolicyLoss(), keep=(TopEntropy(0.3),)),),
    "weighted kl": (component(ClippedPolicyLoss()), ObjectiveTerm("kl", KLPenalty(k3, "tokens", True), "policy", 0.5)),
    "kl, value of one, gradient of another": (
        component(ClippedPolicyLoss()),
        ObjectiveTerm("kl", KLPenalty(Divergence(k1, k2), "tokens"), "policy", 0.5),
    ),
    **{
        name: (component(ClippedPolicyLoss()), ObjectiveTerm(name, loss, "policy", 0.5))
        for name, loss in (("dpo", DPO()), ("ipo", IPO()), ("kto", KTO()))
    },
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_does_not_depend_on_the_cut(steps, name):
    """N1, on a batch's first optimizer step and on the second, where ratios differ from 1."""
    objective = Objective(OBJECTIVES[name], 11.0)
    epochs = {"epochs_per_batch": 2}
    whole, metrics = steps.gradients(objective, **epochs)
    assert len(whole) == 2
    assert float(whole[1].norm()) > 1e-5
    for options in ({"micro_batch_size": 1}, {"micro_batch_tokens": 30, "packing": True}):
        cut, again = steps.gradients(objective, **epochs, **options)
        for left, right in zip(cut, whole, strict=True):
            assert gap(left, right) < 1e-5, options
        for key in (k for k in metrics if k.startswith("loss/")):
            assert again[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def sums(steps, model):
    """The sum of log-probs of every decided response under a float64 model, with gradient."""
    return [
        (token_statistics(model, r)[0] * torch.as_tensor(w[1:]).double()).sum()
        for r, w in zip(steps.batch.rollouts, steps.batch.token_columns["weight/policy"], strict=True)
        if w.any()
    ]


@pytest.mark.parametrize("name", ["pacs", "copg", "dpo", "ipo", "kto", "trajectory balance", "outcome"])
def test_the_gradient_of_a_loss_of_responses_is_that_of_the_float64_model(steps, name):
    """By the chain rule through finite differences of the oracle in the responses' sums."""
    loss, wanted = OF_RESPONSES[name]
    now = sums(steps, steps.model)
    live = [i for i, w in enumerate(steps.batch.token_columns["weight/policy"]) if w.any()]
    with torch.no_grad():
        reference = [float(v) for v in sums(steps, steps.reference_model)]
    values = np.asarray([float(v.detach()) for v in now])
    groups = [steps.batch.rollouts[i].group for i in live]
    s = SimpleNamespace(
        logprobs=values,
        proximal=values.tolist(),
        reference=reference,
        group=groups,
        reward=[float(steps.batch.columns["reward"][i]) for i in live],
    )
    slopes = finite_differences(lambda x: wanted(x, s), values)
    want = gradient_of(steps.model, sum(float(d) * v for d, v in zip(slopes, now, strict=True)))
    weights = Objective((ObjectiveTerm("policy", loss, "policy"),))
    for options in CUTS:
        (gradient,), metrics = steps.gradients(weights, **options)
        assert gap(gradient, want) < 1e-5, options
        assert metrics["loss/policy"] == pytest.approx(wanted(values, s), rel=1e-5)


def test_factors_of_tokens_multiply_a_coefficient(steps):
    """They count in no denominator: 0, 1 and 3 times the penalty of each token, over the number of all tokens."""
    factors, weights = steps.batch.token_columns["factor/kl"], steps.batch.token_columns["weight/policy"]
    total = sum(float(w.sum()) for w in weights)
    value = 0.0
    for rollout, factor, weight in zip(steps.batch.rollouts, factors, weights, strict=True):
        with torch.no_grad():
            reference = token_statistics(steps.reference_model, rollout)[0]
        d = reference - token_statistics(steps.model, rollout)[0]
        value = value + ((d.exp() - 1 - d) * torch.as_tensor(factor[1:] * weight[1:]).double()).sum() / total
    want = gradient_of(steps.model, value)
    kl = ObjectiveTerm("kl", KLPenalty(k3, "tokens"), "policy", by_token=True)
    for options in CUTS:
        (gradient,), metrics = steps.gradients(Objective((kl,)), **options)
        assert gap(gradient, want) < 1e-5
        assert metrics["loss/kl"] == pytest.approx(float(value.detach()), rel=1e-5)
    steps.batch.token_columns["factor/kl"] = [np.full(len(f), 2.5, np.float32) for f in factors]
    twice = steps.gradients(Objective((kl,)))[0][0]
    plain = steps.gradients(Objective((dataclasses.replace(kl, by_token=False),)))[0][0]
    assert gap(twice, 2.5 * plain) < 1e-6


def test_the_average_over_groups(steps):
    """The mean over groups of the mean over each group's tokens; undecided responses count nowhere."""
    value, groups = 0.0, {}
    for i, rollout in enumerate(steps.batch.rollouts):
        if steps.batch.token_columns["weight/policy"][i].any():
            groups.setdefault(rollout.group, []).append(i)
    for members in groups.values():
        count = sum(float(steps.batch.token_columns["weight/policy"][i].sum()) for i in members)
        for i in members:
            weight = torch.as_tensor(steps.batch.token_columns["weight/policy"][i][1:]).double()
            logprobs = token_statistics(steps.model, steps.batch.rollouts[i])[0]
            value = value - steps.batch.columns["advantage"][i] * (logprobs * weight).sum() / count / len(groups)
    want = gradient_of(steps.model, value)
    for options in CUTS:
        (gradient,), metrics = steps.gradients(Objective((component(Reinforce(average="groups")),)), **options)
        assert gap(gradient, want) < 1e-5
        assert metrics["loss/policy"] == pytest.approx(float(value.detach()), rel=1e-4, abs=1e-6)


def test_top_entropy_in_the_learner(steps):
    """The quantile is that of all decided tokens, the denominator is not touched."""
    entropies = [token_statistics(steps.model, r)[1].detach().numpy() for r in steps.batch.rollouts]
    weights = [w[1:] for w in steps.batch.token_columns["weight/policy"]]
    bound = np.quantile(np.concatenate([e[w > 0] for e, w in zip(entropies, weights, strict=True)]), 0.7)
    total = sum(float(w.sum()) for w in weights)
    value = sum(
        -(float(a) * token_statistics(steps.model, r)[0] * torch.as_tensor((e >= bound) * w).double()).sum() / total
        for a, r, e, w in zip(steps.batch.columns["advantage"], steps.batch.rollouts, entropies, weights, strict=True)
    )
    want = gradient_of(steps.model, value)
    objective = Objective((component(ClippedPolicyLoss(average="tokens"), keep=(TopEntropy(0.3),)),))
    for options in CUTS:
        (gradient,), metrics = steps.gradients(objective, **options)
        assert gap(gradient, want) < 1e-5
        assert 0.1 < metrics["tokens/kept"] < 0.5
    everything = Objective((component(ClippedPolicyLoss(average="tokens"), keep=(TopEntropy(1.0),)),))
    plain = Objective((component(ClippedPolicyLoss(average="tokens")),))
    assert gap(steps.gradients(everything)[0][0], steps.gradients(plain)[0][0]) < 1e-7


def test_only_who_asks_pays_for_the_extra_pass(steps, monkeypatch):
    from rlvr.learner import learner

    seen = []
    forward = learner.forward

    def counted(*arguments, **options):
        seen.append(torch.is_grad_enabled())
        return forward(*arguments, **options)

    monkeypatch.setattr(learner, "forward", counted)
    mismatch = [False]  # of the rollouts that have no gradient
    for loss, passes in ((ClippedPolicyLoss(), [True]), (SecondMomentLoss(), [False, True])):
        seen.clear()
        steps.gradients(Objective((component(loss),)))
        assert seen == mismatch + passes


def test_unknown_behaviour_is_refused_where_it_is_read(steps):
    steps.batch.rollouts[0].behaviour_logprobs[:] = np.nan
    for loss, options in (
        (TaperedLoss(), {}),
        (RewardClassification(), {"epochs_per_batch": 2}),
        (SecondMomentLoss(), {"epochs_per_batch": 2}),
    ):
        with pytest.raises(TrainingError, match="behaviour log-probs"):
            steps.gradients(Objective((component(loss),)), **options)
    steps.gradients(Objective((component(RewardClassification()),)))


def test_the_reference_follows(make_policy, make_batch, recording):
    """After a step: mix x policy + (1 - mix) x reference, and nothing while it is not due."""
    steps = Steps(make_policy, make_batch, recording)
    objective = Objective(
        (component(ClippedPolicyLoss()), ObjectiveTerm("kl", KLPenalty(k3, "tokens"), "policy", 0.1)),
        renewal=Renewal(every=3, mix=0.25),
    )
    before = {name: w.clone() for name, w in steps.reference.weights.items()}
    for step in (0, 1):
        steps.gradients(objective.at(step, 10))
        assert all(torch.equal(before[name], w) for name, w in steps.reference.weights.items())
    steps.gradients(objective.at(2, 10))
    for name, parameter in steps.policy.trainable().items():
        torch.testing.assert_close(steps.reference.weights[name], 0.75 * before[name] + 0.25 * parameter.detach())
    steps.gradients(dataclasses.replace(objective, renewal=Renewal(1, 1.0)).at(0, 10))
    for name, parameter in steps.policy.trainable().items():
        torch.testing.assert_close(steps.reference.weights[name], parameter.detach())


def test_likelihood_of_chosen_responses(steps):
    batch = steps.batch
    right = ChosenLikelihood(threshold=1.0).weights(batch)
    best = ChosenLikelihood(on="best").weights(batch)
    rewards, groups = batch.columns["reward"], [r.group for r in batch.rollouts]
    assert [bool(w.any()) for w in right] == [r == 1.0 for r in rewards]
    wanted = set()
    for g in set(groups):
        members = [i for i, h in enumerate(groups) if h == g and not math.isnan(rewards[i])]
        if len({rewards[i] for i in members}) > 1:
            wanted.add(max(members, key=lambda i: (rewards[i], -i)))
    assert {i for i, w in enumerate(best) if w.any()} == wanted
    batch.token_columns["weight/likelihood"] = right
    for weigh in ("evenly", "by_doubt"):
        total = sum(float(w.sum()) for w in right)
        value = 0.0
        for r, w in zip(batch.rollouts, right, strict=True):
            x = token_statistics(steps.model, r)[0]
            p = x.detach().exp()
            factor = p * (1 - p) if weigh == "by_doubt" else torch.ones_like(p)
            value = value - (factor * x * torch.as_tensor(w[1:]).double()).sum() / total
        want = gradient_of(steps.model, value)
        loss = ChosenLikelihood(weigh=weigh)
        for options in CUTS:
            (gradient,), _ = steps.gradients(Objective((ObjectiveTerm("likelihood", loss, "likelihood"),)), **options)
            assert gap(gradient, want) < 1e-5
