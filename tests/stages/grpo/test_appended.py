"""Losses that read a token put after responses, or the label of a given response, through the real trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlvr.errors import ConfigError, DataError
from rlvr.records import Batch, Origin, StopReason
from rlvr.stages.grpo.appended import with_token
from small_run import changed, overlaid, task_rows, weights

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


# given responses with labels


def labelled(count=6):
    return [{**row, "label": n % 2, "demonstration": str(n % 2) * 3} for n, row in enumerate(task_rows(count))]


def stage(**options):
    return {"stages": [{"kind": "sft", "loss": {"name": "outcome_classifier", "beta": 0.5}, **options}]}


def test_an_implicit_reward_model_learns_its_labels(make_trainer):
    """The log-ratio of responses of label 1 rises above 0, that of the others falls below it."""
    over = overlaid(stage(), {"run": {"steps": 40}, "rollout": {"prompts_per_step": 6}, "logging": {"rollouts": 0}})
    trainer = make_trainer(over, tasks=labelled())
    trainer.train()
    rows = trainer.metrics
    assert rows[0]["loss/outcome_classifier"] == pytest.approx(np.log(2), rel=1e-4)  # the model is its own reference
    assert rows[-1]["loss/outcome_classifier"] < 0.2
    batch = trainer.batch
    for i, rollout in enumerate(batch.rollouts):
        on = rollout.origin == Origin.DEMONSTRATION
        now, then = batch.token_columns["logprobs/updated"][i][on], batch.token_columns["logprobs/reference"][i][on]
        assert (float((now - then).sum()) > 0) == (rollout.task.info["label"] == 1)


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


@pytest.mark.parametrize(
    ("over", "rows", "error", "problem"),
    [
        (stage(), task_rows(), DataError, "task 't0' has no `label`"),
        (stage(), [{**labelled()[0], "label": "yes"}], DataError, "has no `label`"),
        (stage(loss="dpo"), labelled(), ConfigError, "the loss 'dpo' chooses or compares sampled responses"),
        (stage(loss="likelihod"), labelled(), ConfigError, "likelihood"),
        (stage(loss={"name": "likelihood", "threshold": 0.5}), labelled(), ConfigError, "chooses or compares"),
    ],
    ids=["no label", "no number", "pairs", "typo", "chosen"],
)
def test_what_a_stage_of_given_responses_cannot_do(make_trainer, over, rows, error, problem):
    with pytest.raises(error, match=problem):
        make_trainer(over, tasks=rows)
