"""Losses that read a token put after responses, through the real trainer."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.errors import ConfigError
from rlvr.records import Batch, Origin, StopReason
from rlvr.stages.grpo.appended import with_token
from small_run import changed, overlaid, weights

SCORE = {"name": "last_token", "token": "?", "beta": 0.2, "constant": -5.0}


def even(completion):
    return float(completion[:1] in tuple("02468"))


@pytest.mark.gate
def test_the_token_is_put_after_responses_that_ended_and_trains_nothing_else(make_trainer):
    over = {"algorithm": {"auxiliary": [SCORE]}, "rollout": {"prompts_per_step": 4, "group_size": 8}}
    trainer = make_trainer(overlaid(over, {"logging": {"rollouts": 100}}), verifier=even)
    before = weights(trainer)
    trainer.train(2)
    assert changed(before, weights(trainer))
    batch, token = trainer.batch, trainer.policy.tokenizer.encode("?")[0]
    ended = [not r.stop.truncated for r in batch.rollouts]
    assert 0 < sum(ended) < len(ended)
    for i, (rollout, put) in enumerate(zip(batch.rollouts, ended, strict=True)):
        marks = batch.token_columns["weight/last_token"][i]
        assert (rollout.origin[-1] == Origin.HINT) == put
        assert marks.sum() == float(put) and not batch.token_columns["weight/policy"][i][~rollout.sampled].any()
        if put:
            assert rollout.token_ids[-1] == token and marks[-1] == 1 and np.isnan(rollout.behaviour_logprobs[-1])
    assert trainer.metrics[1]["loss/last_token"] > 0


def test_a_response_that_fills_the_context_gets_no_token(make_trainer):
    trainer = make_trainer()
    trainer.train(1)
    batch = trainer.batch
    full = batch.rollouts[0]
    full.stop = StopReason.END
    longer = with_token(
        Batch(batch.rollouts[:1], {}, {"weight/policy": [np.ones(len(full), np.float32)]}), 5, len(full)
    )
    assert len(longer.rollouts[0]) == len(full)
    longer = with_token(
        Batch(batch.rollouts[:1], {}, {"weight/policy": [np.ones(len(full), np.float32)]}), 5, len(full) + 1
    )
    assert len(longer.rollouts[0]) == len(full) + 1 and longer.token_columns["weight/policy"][0][-1] == 0


@pytest.mark.parametrize(
    ("auxiliary", "problem"),
    [
        ([{**SCORE, "token": "??"}], "is 2 tokens of the model's tokenizer"),
        ([{"name": "last_token"}], "needs the option 'token'"),
        ([SCORE, {**SCORE, "token": "="}], "put different tokens after a response"),
    ],
    ids=str,
)
def test_a_token_that_is_none_is_refused(make_trainer, auxiliary, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer({"algorithm": {"auxiliary": auxiliary}})
