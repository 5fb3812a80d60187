"""Averages over tokens: denominators, weights, and sums over micro-batches."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch

from loss_cases import Case
from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.losses import (
    ClippedPolicyLoss,
    Denominators,
    KLPenalty,
    LikelihoodLoss,
    Objective,
    ObjectiveTerm,
    TokenBatch,
    k3,
)
from rlvr.records import Batch

AVERAGES = ("tokens", "sequences", "constant")


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
