"""LASER: another reward's normalised column mixed into the advantage, against a loop; the policy's score of itself."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage_helpers import assert_sound, cases, of_case
from rlvr.advantages import GroupAdvantage
from rlvr.config.config_loading import make_config
from rlvr.errors import ConfigError
from rlvr.recipes.laser.laser import Blend
from rlvr.recipes.laser.last_token_loss import LastTokenReward


def blended(batch, advantage, share, least):
    """Loop by loop: (1 - share) A + share x the group-normalised column of the decided members, clipped to [-1, 1]; A
    where the column hardly differs. The deviation is over n - 1."""
    column = [max(-1.0, min(1.0, value)) for value in batch.columns["reward/other"]]
    rewards, groups = batch.columns["reward"], [r.group for r in batch.rollouts]
    result = []
    for i, value in enumerate(advantage):
        peers = [column[j] for j in range(len(column)) if groups[j] == groups[i] and math.isfinite(rewards[j])]
        mixed = value
        if math.isfinite(rewards[i]) and len(peers) > 1 and (spread := statistics.stdev(peers)) > least:
            mixed = (1 - share) * value + share * (column[i] - statistics.fmean(peers)) / (spread + 1e-4)
        result.append(mixed)
    return result


@given(case=cases, share=st.sampled_from([0.0, 0.1, 1.0]), least=st.sampled_from([0.0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_a_column_is_mixed_in(case, share, least):
    batch = of_case(case)
    batch.columns["reward/other"] = np.random.default_rng(len(case)).normal(size=len(batch))
    plain = GroupAdvantage()(batch)
    got = Blend("other", share, least, unbiased=True, bounds=(-1.0, 1.0))(batch, plain)
    np.testing.assert_allclose(got, blended(batch, plain, share, least), atol=1e-9)
    assert_sound(batch, got)
    if share == 0:
        np.testing.assert_array_equal(got, plain)


def test_a_share_that_is_none_and_a_term_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="share is 1"):
        Blend(share=1.5)
    with pytest.raises(ValueError, match="the lower one comes first"):
        Blend(bounds=(1.0, 0.0))
    config = make_config({})
    with pytest.raises(ConfigError, match=r"blend is of 'verdit', and there is no such term.*did you mean 'verdict'"):
        Blend("verdit").check(config, [])


SCORE = {"name": "last_token", "token": "?", "beta": 0.2, "constant": -5.0}


def even(completion):
    return float(completion[:1] in tuple("02468"))


@pytest.mark.parametrize(
    ("option", "problem"),
    [({"beta": 0.0}, "beta=0.0 must be above 0"), ({"constant": 1.0}, "constant=1.0 below 0")],
    ids=str,
)
def test_options_of_the_score_out_of_range_are_refused(option, problem):
    with pytest.raises(ValueError, match=problem):
        LastTokenReward("~", **option)


@pytest.mark.gate
def test_a_policy_learns_to_judge_itself(make_trainer):
    """With the verdict on what is there to see, the token's log-prob comes to tell right from wrong."""
    over = {
        "run": {"steps": 60},
        "rewards": ["verdict", {**SCORE, "weight": 0}],
        "algorithm": {"auxiliary": [SCORE], "loss_coef": 0.0},
        "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 3, "stop": list("0123456789")},
        "logging": {"rollouts": 0},
    }
    trainer = make_trainer(over, verifier=even)
    trainer.train()
    rows = trainer.metrics
    assert np.mean([r["loss/last_token"] for r in rows[-9:]]) < 0.6 * np.mean([r["loss/last_token"] for r in rows[:9]])
    batch = trainer.batch
    ended = np.asarray([not r.stop.truncated for r in batch.rollouts])
    right = batch.columns["reward/verdict"] == 1
    score = batch.columns["reward/last_token"]
    assert score[ended & right].mean() > score[ended & ~right].mean() + 0.2
    np.testing.assert_array_equal(batch.columns["reward"], batch.columns["reward/verdict"])


@pytest.mark.gate
def test_the_score_is_the_log_prob_of_the_token(make_trainer):
    trainer = make_trainer({"rewards": ["verdict", {**SCORE, "weight": 0}], "optim": {"lr": 1e-12}}, verifier=even)
    trainer.train(1)
    for rollout, score in zip(trainer.batch.rollouts, trainer.batch.columns["reward/last_token"], strict=True):
        if rollout.stop.truncated:
            assert score == 0
            continue
        ids = torch.as_tensor(rollout.token_ids)[None]
        with torch.no_grad():
            logits = trainer.policy.model(input_ids=ids).logits[0, -1].double()
        logprob = float(torch.log_softmax(logits, 0)[trainer.policy.tokenizer.encode("?")[0]])
        assert score == pytest.approx(0.2 * (logprob + 5.0), abs=1e-5)
