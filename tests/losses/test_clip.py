"""Losses against nested float64 loops and finite differences of those loops."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_cases import Case, value_and_gradient

from number_oracles import clipped, divergence, finite_differences
from rlvr import registry
from rlvr.core.needs import CURRENT, REFERENCE
from rlvr.errors import ConfigError
from rlvr.losses import (
    ClippedPolicyLoss,
    Denominators,
    EntropyBonus,
    KLPenalty,
    LikelihoodLoss,
    Objective,
    ObjectiveTerm,
    TokenBatch,
    k1,
    k2,
    k3,
)
from rlvr.records import Batch

AVERAGES = ("tokens", "sequences", "constant")
KL = {"k1": k1, "k2": k2, "k3": k3}


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


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", list(KL))
def test_kl(average, name):
    case = Case(2)

    def oracle(logprobs):
        return case.average([divergence(name, x, r) for x, r in zip(logprobs, case.reference, strict=True)], average)

    value, gradient = value_and_gradient(KLPenalty(KL[name], average), case.batch(), case.over())
    assert value == pytest.approx(oracle(case.logprobs), rel=1e-12)
    np.testing.assert_allclose(gradient, finite_differences(oracle, case.logprobs), rtol=1e-6, atol=1e-9)


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


@pytest.mark.parametrize("average", AVERAGES)
def test_shares_of_micro_batches_sum_to_the_whole(average):
    case = Case(5)
    whole = ClippedPolicyLoss(average=average)(case.batch(), case.over()).value
    parts = []
    for sequences in ([0, 2], [1], [3], [4]):
        part = Case(5)
        keep = np.isin(case.sequence, sequences)
        for name in ("proximal", "logprobs", "reference", "advantage", "weight", "entropy"):
            setattr(part, name, getattr(case, name)[keep])
        part.sequence = np.searchsorted(sequences, case.sequence[keep])
        part.S = len(sequences)
        parts.append(float(ClippedPolicyLoss(average=average)(part.batch(), case.over()).value.detach()))
    assert sum(parts) == pytest.approx(float(whole.detach()), rel=1e-12)


def test_equal_lengths_make_all_averages_equal():
    case = Case(6, (4, 4, 4))
    case.weight = np.ones(12)
    over = case.over(constant=4.0)
    values = [float(ClippedPolicyLoss(average=a)(case.batch(), over).value.detach()) for a in AVERAGES]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert values[0] == pytest.approx(values[2], rel=1e-12)


def test_denominators_and_what_trains(make_rollout):
    rollouts = [make_rollout([1] * n, prompt=2, group=g) for n, g in ((4, "a"), (6, "a"), (5, "b"), (3, "b"))]
    weights = [np.asarray([0] * 2 + [1] * (len(r) - 2), dtype=np.float32) for r in rollouts]
    weights[2][:] = 0
    batch = Batch(rollouts, {"advantage": np.asarray([1.0, 0.0, 3.0, -1.0])}, {"weight/policy": weights})
    policy = ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", zero_without_advantage=True)
    objective = Objective((policy,), constant=9.0)
    assert objective.denominators(batch) == {"policy": Denominators(7.0, 3.0, 9.0)}
    assert objective.trains(batch).tolist() == [True, False, False, True]
    kl = ObjectiveTerm("kl", KLPenalty(k3, "sequences"), "policy", 0.1)
    assert Objective((policy, kl)).trains(batch).tolist() == [True, True, False, True]
    fixed = ObjectiveTerm("policy", ClippedPolicyLoss(average="constant", constant=5), "policy")
    assert Objective((fixed,), constant=9.0).denominators(batch)["policy"].constant == 5.0
    per_token = batch.select(range(4))
    del per_token.columns["advantage"]
    per_token.token_columns["advantage"] = [np.zeros(len(r)) for r in rollouts]
    per_token.token_columns["advantage"][1][0] = 1.0  # on a token that weighs nothing
    assert objective.trains(per_token).tolist() == [False] * 4
    per_token.token_columns["advantage"][1][-1] = 1.0
    assert objective.trains(per_token).tolist() == [False, True, False, False]


def test_at_fixes_schedules_and_drops_what_weighs_nothing():
    from rlvr.core.schedules import Schedule, StepSchedule

    objective = Objective(
        (
            ObjectiveTerm(
                "policy", ClippedPolicyLoss(clip_high=Schedule(schedule="linear", start=0.2, end=0.4)), "policy"
            ),
            ObjectiveTerm("kl", KLPenalty(k3, "sequences"), "policy", StepSchedule(at={0: 0.0, 5: 0.1})),
        )
    )
    start, later = objective.at(0, 10), objective.at(5, 10)
    assert [c.name for c in start.components] == ["policy"]
    assert not any(need.model == REFERENCE for need in start.needs)
    assert later.components[0].loss.clip_high == pytest.approx(0.3)
    assert later.components[1].coef == 0.1
    assert any(need.model == REFERENCE for need in later.needs)


def test_every_component_of_a_stage_divides_by_the_same_constant(make_rollout):
    from rlvr.config.config_loading import load_config
    from rlvr.config.stage_plan import stage_plans
    from rlvr.stages.grpo.build_objective import build_objective

    loss = {"name": "clip", "average": "constant", "constant": 5}
    tree = {"run": {"steps": 1}, "algorithm": {"loss": loss, "kl": {"coef": 0.1}, "entropy": 0.1}}
    objective = build_objective(stage_plans(load_config(tree))[0], shares_weights=True)
    rollout = make_rollout([1, 2, 3, 4, 5])
    batch = Batch([rollout], {}, {"weight/policy": [rollout.sampled.astype(np.float32)]})
    assert {over.constant for over in objective.denominators(batch).values()} == {5.0}


@pytest.mark.parametrize("by", ["tokens", "sequences", "constant"])
def test_an_average_multiplies_by_the_weight_that_a_loss_sees(by):
    """The product of all weights of a token, of which denominators count the component's alone; nothing changes it
    afterwards."""
    case, rng = Case(3), np.random.default_rng(0)
    values, importance, kept, factor = rng.normal(size=(4, len(case.weight)))
    tokens = replace(
        case.batch(), importance=torch.tensor(importance), kept=torch.tensor(kept), factor=torch.tensor(factor)
    )
    np.testing.assert_allclose(tokens.loss_weight, case.weight * importance * kept * factor, rtol=1e-14)
    value = float(tokens.average(torch.tensor(values), by, case.over(7.0)))
    assert value == pytest.approx(case.average(values * importance * kept * factor, by), rel=1e-12)
    with pytest.raises(FrozenInstanceError):
        tokens.importance = None


def test_the_product_of_weights_has_the_bits_of_one_multiplication_after_the_other():
    """Where all but one of a token's weights are 0 or 1, as the library's own are: in float32."""
    rng = np.random.default_rng(1)
    weight, kept = (torch.tensor(rng.integers(0, 2, 1000), dtype=torch.float32) for _ in range(2))
    values, importance = (torch.tensor(rng.normal(size=1000), dtype=torch.float32) for _ in range(2))
    one = torch.zeros(1000)
    tokens = TokenBatch(
        sequence=one.long(),
        sequences=1,
        weight=weight,
        advantage=one,
        proximal_logprobs=one,
        behaviour_logprobs=one,
        importance=importance,
        kept=kept,
    )
    assert (tokens.loss_weight * values).equal(kept * (importance * (weight * values)))


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


@pytest.mark.parametrize(
    ("name_in_verl", "average"),
    [("token-mean", "tokens"), ("seq-mean-token-mean", "sequences"), ("seq-mean-token-sum-norm", "constant")],
)
def test_the_names_of_verl_stand_for_an_average(name_in_verl, average):
    assert registry.build("loss", {"name": "clip", "average": name_in_verl}).average == average


def test_an_unknown_average_is_refused():
    with pytest.raises(ConfigError, match="average='words'"):
        registry.build("loss", {"name": "clip", "average": "words"})
    with pytest.raises(ConfigError, match="'mine' has average='token': it is one of tokens, sequences"):
        ObjectiveTerm("mine", LikelihoodLoss(average="token"), "policy")
    case = Case(0)
    with pytest.raises(ValueError, match="no average 'token'"):
        case.batch().average(torch.zeros(1), "token", case.over())
