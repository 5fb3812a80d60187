"""`algorithm.splice`: the task's answer in the place of the policy's own, through the real stage and trainer."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.config import SpliceConfig
from rlvr.errors import ConfigError, DataError
from rlvr.records import Batch, Origin, Task
from rlvr.stages.grpo.splice import with_answers
from small_run import changed, overlaid, weights

REINFORCE = {"loss": {"name": "reinforce"}, "correction": None}
OPENING = "="


def spliced(over=None, **splice):
    """A small run whose opening a response often has: the policy samples from 13 characters."""
    algorithm = {"algorithm": {**REINFORCE, "splice": {"opening": OPENING, "text": "{answer}?", **splice}}}
    return overlaid(overlaid(algorithm, {"rollout": {"max_new_tokens": 12, "group_size": 8}}), over or {})


@pytest.fixture
def make_batch(make_rollout, policy):
    """`make_batch(texts, advantage, reward)`: responses of one token for each character."""

    def make(texts, advantages, rewards, answer="7"):
        rollouts = []
        for member, text in enumerate(texts):
            ids = policy.tokenizer.encode("Q" + text, add_special_tokens=False)
            rollout = make_rollout(ids, prompt=1, group="g", member=member)
            rollout.text = text
            rollout.task = Task(id="t", prompt="Q", answer=answer)
            rollouts.append(rollout)
        weight = [rollout.sampled.astype(np.float32) for rollout in rollouts]
        columns = {"reward": np.asarray(rewards, dtype=np.float64), "advantage": np.asarray(advantages)}
        return Batch(rollouts, columns, {"weight/policy": weight})

    return make


def test_the_answer_stands_in_the_place_of_the_policy_s_own(make_batch, policy):
    before = make_batch(["so [9] end", "none"], [0.5, -0.5], [0.25, 0.0])
    batch = with_answers(before, SpliceConfig(opening="[", text="{answer}]"), policy)
    first, second = batch.rollouts
    assert policy.tokenizer.decode(first.token_ids) == "Qso [7]"
    np.testing.assert_array_equal(first.origin, [Origin.PROMPT, *[Origin.POLICY] * 4, Origin.HINT, Origin.HINT])
    np.testing.assert_array_equal(batch.tokens("weight/policy")[0], [0, 1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(batch.tokens("advantage")[0][1:], [0.5] * 4 + [0.25] * 2)
    assert np.isnan(first.behaviour_logprobs[-2:]).all() and (first.policy_version[-2:] == -1).all()
    assert second is before.rollouts[1]
    np.testing.assert_array_equal(batch.tokens("advantage")[1][1:], [-0.5] * 4)
    # What was sampled is not changed.
    assert policy.tokenizer.decode(before.rollouts[0].token_ids) == "Qso [9] end"


@pytest.mark.parametrize(("by", "weight"), [("reward", 0.25), ("advantage", 0.5), ("one", 1.0)])
def test_the_weight_of_the_answer(make_batch, policy, by, weight):
    batch = with_answers(make_batch(["so [9]"], [0.5], [0.25]), SpliceConfig(opening="[", by=by), policy)
    assert batch.tokens("advantage")[0][-1] == weight


def test_what_stays_as_it_is(make_batch, policy):
    """A response that does not train, one of a task without an answer; an answer that does not fit is left out."""
    batch = make_batch(["so [9]", "so [9]", "so [9]"], [0.5] * 3, [0.25] * 3)
    batch.token_columns["weight/policy"][0][:] = 0
    batch.rollouts[1].task = Task(id="bare", prompt="Q")
    batch.rollouts[2].task = Task(id="long", prompt="Q", answer="1" * policy.context)
    after = with_answers(batch, SpliceConfig(opening="["), policy)
    assert [policy.tokenizer.decode(r.token_ids) for r in after.rollouts] == ["Qso [9]", "Qso [9]", "Qso ["]


def test_other_token_columns_have_what_is_known_of_tokens_that_nobody_sampled(make_batch, policy):
    batch = make_batch(["so [9] end"], [0.5], [0.25])
    batch.token_columns["entropy/current"] = [np.full(len(batch.rollouts[0]), 2.0, dtype=np.float32)]
    entropy = with_answers(batch, SpliceConfig(opening="[", text="{answer}]"), policy).tokens("entropy/current")[0]
    assert entropy.dtype == np.float32
    np.testing.assert_array_equal(entropy, [2, 2, 2, 2, 2, np.nan, np.nan])


def test_a_run_learns_the_answers(make_trainer):
    """With no signal in the rewards the policy learns what is put after its opening, and nothing else."""
    over = spliced({"run": {"steps": 25}, "rewards": [{"name": "constant", "value": 1.0}]})
    trainer = make_trainer(over)
    before = weights(trainer)
    trainer.train()
    assert changed(before, weights(trainer))
    put = [r for r in trainer.batch.rollouts if (r.origin == Origin.HINT).any()]
    assert put
    for rollout in put:
        hint = np.flatnonzero(rollout.origin == Origin.HINT)
        tail = trainer.policy.tokenizer.decode(rollout.token_ids[hint[0] - 1 :])
        assert tail == f"{OPENING}{rollout.task.answer}?"
    losses = [row["loss/policy"] for row in trainer.metrics if row["loss/policy"]]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"algorithm": {"splice": {"text": "no answer"}}}, "has to name the task's answer"),
        ({"algorithm": {"splice": {"opening": ""}}}, "at least 1 character"),
        ({"algorithm": {"splice": {}, "preset": "gspo"}}, "takes one advantage per response"),
        ({"algorithm": {"splice": {}, "correction": "truncate"}}, "set correction to null"),
        ({"algorithm": {"splice": {}}, "optim": {"updates_per_batch": 2}}, "set algorithm.decoupled to true"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(make_trainer, over, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer(over)


@pytest.mark.parametrize("over", [{"algorithm": {"decoupled": True}}, {"algorithm": REINFORCE}], ids=str)
def test_several_updates_train_where_no_ratio_is_unknown(make_trainer, over):
    trainer = make_trainer(spliced(overlaid({"optim": {"updates_per_batch": 2}, "run": {"steps": 2}}, over)))
    rows = trainer.train()
    assert [row["update/steps"] for row in rows] == [2, 2]


def test_tasks_without_answers_are_refused(make_trainer):
    rows = [{"id": f"t{n}", "prompt": f"{n}=?"} for n in range(4)]
    with pytest.raises(DataError, match=r"algorithm\.splice learns the tasks' answers, and 4 of 4 tasks have none"):
        make_trainer(spliced(), tasks=rows)
