"""Rewards and selection in the real trainer: schedules, memory over a resume, statistics of the policy, votes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlvr import registry
from rlvr.errors import ConfigError, DataError
from rlvr.verifiers import Verifier
from small_run import changed, task_rows, timeless, weights


def test_a_weight_is_followed_and_reported(make_trainer):
    moving = {"name": "length", "per": 10, "weight": {"schedule": "linear", "start": 0.0, "end": -0.6}}
    trainer = make_trainer({"rewards": ["verdict", moving]})
    rows = trainer.train(3)
    assert [row["schedule/reward/length.weight"] for row in rows] == pytest.approx([0.0, -0.2, -0.4])
    columns = trainer.batch.columns
    np.testing.assert_allclose(columns["reward"], columns["reward/verdict"] - 0.4 * columns["reward/length"])


def test_a_weight_that_follows_its_own_term_falls_when_the_term_is_satisfied(make_trainer):
    held = {"name": "length", "weight": {"metric": "reward/length", "target": 0.001, "initial": 1.0, "gain": -0.5}}
    rows = make_trainer({"rewards": ["verdict", held]}).train(3)
    assert [row["schedule/reward/length.weight"] for row in rows] == pytest.approx([1.0, 0.9, 0.81])


def test_a_memory_survives_a_checkpoint(make_trainer):
    over = {
        "run": {"steps": 4},
        "verifier": {"name": "regex", "pattern": ".*[02468].*"},
        "rewards": ["verdict", {"name": "adaptive_length_target", "buckets": 2, "window": 4}],
        "algorithm": {"select": [{"name": "spread", "share": 0.2, "decay": 0.5}]},
        "checkpoint": {"every": 2},
    }
    whole, first = make_trainer(over, "whole"), make_trainer(over, "parts")
    whole.train()
    first.train(2)
    first.close()
    second = make_trainer(over, "parts")
    second.train(resume="auto")
    state = whole.stages[0].scoring.components.state_dict()
    assert any(remembered for remembered in state)
    assert second.stages[0].scoring.components.state_dict() == state
    assert timeless(second.metrics) == timeless(whole.metrics)
    assert changed(weights(whole), weights(second)) == []


def test_looking_at_rewards_leaves_no_trace(make_trainer):
    over = {
        "verifier": {"name": "regex", "pattern": ".*[02468].*"},
        "rewards": ["verdict", "adaptive_length_target"],
        "rollout": {"dynamic_sampling": {"attempts": 2}},
    }
    trainer = make_trainer(over)
    trainer.train(1)
    stage = trainer.stages[0]
    before = stage.scoring.components.state_dict()
    stage.has_signal(trainer.batch.rollouts)
    stage.observe({})
    assert stage.scoring.components.state_dict() == before


def test_statistics_are_taken_once_for_rewards_and_advantages(make_trainer, monkeypatch):
    from rlvr.stages.grpo import scoring

    asked = []
    plain = scoring.add_statistics
    monkeypatch.setattr(scoring, "add_statistics", lambda *a: (asked.append(a[2]), plain(*a))[1])
    over = {"rewards": ["verdict", {"name": "entropy", "weight": 0.1}], "algorithm": {"modifiers": ["entropy"]}}
    trainer = make_trainer(over)
    trainer.train(1)
    assert len(asked) == 1
    entropy = trainer.metrics[0]["entropy/trained"]
    assert trainer.metrics[0]["reward/entropy"] == pytest.approx(entropy, rel=0.1)


def test_votes_are_the_reward_where_the_verdicts_are_not(make_trainer, pieces):
    trainer = make_trainer(
        {"verifier": f"{pieces}:Odd", "rewards": ["majority_vote"], "rollout": {"max_new_tokens": 1}}
    )
    trainer.train(1)
    for group in trainer.batch.groups():
        answers = [r.verdict.answer.strip() for r in group.rollouts]
        most = max(map(answers.count, answers))
        winners = {a for a in answers if answers.count(a) == most}
        expected = [(a in winners) / len(winners) for a in answers]
        np.testing.assert_allclose(trainer.batch.columns["reward"][group.index], expected)


def test_demonstrations_weigh_what_their_source_does(make_trainer):
    rows = [{**row, "source": "good" if n % 2 else "fair"} for n, row in enumerate(task_rows())]
    stage = {"kind": "sft", "source_weights": {"good": 3.0}}
    trainer = make_trainer({"stages": [stage], "rollout": {"prompts_per_step": 6}}, tasks=rows)
    assert trainer.train(1)[0]["grad_norm"] > 0
    for rollout, weight in zip(trainer.batch.rollouts, trainer.batch.token_columns["weight/likelihood"], strict=True):
        assert set(weight[rollout.origin != 0]) == {3.0 if rollout.task.source == "good" else 1.0}
        assert not weight[rollout.origin == 0].any()
    for weights_written, message in (({"god": 2.0}, "did you mean 'good'"), ({"good": 0.0}, "above 0")):
        with pytest.raises((ConfigError, DataError), match=message):
            make_trainer({"stages": [{**stage, "source_weights": weights_written}]}, "bad", tasks=rows)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"rewards": ["entropy"], "rollout": {"dynamic_sampling": {"attempts": 2}}}, "'entropy' needs a forward pass"),
        (
            {
                "rewards": ["majority_vote"],
                "rollout": {"group_size": 1},
                "algorithm": {"advantage": {"baseline": "none", "scale": "none"}},
            },
            "majority_vote makes a label",
        ),
        ({"rewards": [{"name": "soft_overlong", "cache": 50}]}, "must be 1 to max_length, 6"),
        ({"rewards": [{"name": "verdict", "sources": ["maths"]}]}, "no task is of the source 'maths'"),
        ({"algorithm": {"select": [{"name": "best_worst", "column": "advantage"}]}}, "select_after=true"),
        ({"rewards": [{"name": "length_target", "target": "budget"}]}, "info.budget"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contradictions_are_refused_before_training(make_trainer, over, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(over)


FIELDS = """
def leveled(completion, level):
    return float(level)

def listed(prompts, completions, level, **columns):
    return [float(n) for n in level]
"""


def test_a_field_that_a_task_lacks_is_named_before_training(make_trainer, tmp_path):
    """Of plain functions and TRL's form, inner terms and scorers, of every stage; not of tasks that a term is not
    for."""
    path = tmp_path / "fields.py"
    path.write_text(FIELDS)
    rows = [{**row, "level": 3, "source": "with"} for row in task_rows(6)]
    for row in rows[2:]:
        del row["level"]
        row["source"] = "without"
    plain, listed = f"{path}:leveled", f"{path}:listed"
    inner = {"name": "sum", "terms": ["verdict", plain]}
    for rewards in (["verdict", plain], [{"name": listed, "weight": 0.5}], [inner]):
        with pytest.raises(
            ConfigError, match=r"term '(leveled|listed)' .* 4 of 6 tasks \('t2', 't3', 't4', \.\.\.\).*'level'"
        ):
            make_trainer({"rewards": rewards}, tasks=rows)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"neither a field of .*rows\.jsonl, line 3, task 't2' nor in its info"):
        make_trainer({"rewards": [plain]}, tasks=str(data))
    stages = [{"kind": "grpo", "steps": 1}, {"kind": "grpo", "steps": 1, "rewards": [plain]}]
    with pytest.raises(ConfigError, match="the term 'leveled' cannot be computed"):
        make_trainer({"stages": stages, "run": {"steps": None}}, tasks=rows)
    scorer = {"evaluation": {"scorer": plain, "samples": 2, "k": [2]}}
    with pytest.raises(ConfigError, match="the term 'leveled' cannot be computed for 1 of 1 tasks"):
        make_trainer(scorer, eval_tasks=[{"prompt": "9=?", "answer": "9"}])
    only = {"rewards": ["verdict", {"name": plain, "sources": ["with"]}, {"name": listed, "sources": "with"}]}
    row = make_trainer(only, tasks=rows).train(1)[0]
    assert row["reward/mean"] is not None


class Peers(Verifier):
    """Pays the share of the group's members that are not longer; undecided for a lone `7`."""

    def verify(self, task, completion):
        return self.verify_group(task, [completion])[0]

    def verify_group(self, task, completions):
        return [sum(len(other) <= len(one) for other in completions) / len(completions) for one in completions]


def test_terms_read_verdicts_by_name(make_trainer, monkeypatch):
    """A rule and a verifier of groups beside it: `bounded`, `gate` and `product` of the second, the best of k by it,
    and the verdict of the first everywhere else."""
    monkeypatch.setitem(registry._components["verifier"], "peers", Peers)
    peers = {"name": "verdict", "verifier": "peers"}
    over = {
        "verifier": {"name": "regex", "pattern": ".*[02468].*"},
        "verifiers": {"peers": "peers", "digits": {"name": "regex", "pattern": "[0-9].*"}},
        "rewards": [
            "verdict",
            {"name": "bounded", "term": {**peers, "as": "raw"}, "squash": "clip", "high": 0.5, "as": "half"},
            {"name": "gate", "term": {**peers, "as": "raw"}, "by": "verdict", "as": "gated"},
            {"name": "product", "terms": ["verdict", {**peers, "as": "raw"}], "as": "both"},
        ],
        "evaluation": {"samples": 4, "k": [2], "scorer": peers, "every": 1},
    }
    trainer = make_trainer(over, eval_tasks=[{"prompt": "9=?", "answer": "9"}])
    (row,) = trainer.train(1)
    batch = trainer.batch
    scores = {}
    for group in batch.groups():
        texts = [rollout.text for rollout in group.rollouts]
        scores.update(zip(group.index, Peers().verify_group(None, texts), strict=True))
    raw = np.asarray([scores[i] for i in range(len(batch))])
    even = np.asarray([float(any(c in "02468" for c in rollout.text)) for rollout in batch.rollouts])
    np.testing.assert_array_equal(batch.columns["reward/verdict"], even)
    np.testing.assert_allclose(batch.columns["reward/half"], np.minimum(raw, 0.5))
    np.testing.assert_allclose(batch.columns["reward/gated"], raw * even)
    np.testing.assert_allclose(batch.columns["reward/both"], raw * even)
    assert all(list(r.verdicts) == ["RegexVerifier", "peers", "digits"] for r in batch.rollouts)
    assert row["verdict/correct"] == even.mean()
    assert any("best@2" in name for name in trainer.train(1)[0])


def test_names_of_verifiers_that_do_not_fit_are_refused(make_trainer):
    named = {"verifiers": {"judge": "exact"}}
    with pytest.raises(ConfigError, match=r"no verifier 'jugde'.*did you mean 'judge'"):
        make_trainer({**named, "rewards": [{"name": "verdict", "verifier": "jugde"}]})
    with pytest.raises(ConfigError, match="ExactVerifier: the verifier of the tasks has this name"):
        make_trainer({"verifier": "exact", "verifiers": {"ExactVerifier": "math"}})
    with pytest.raises(ConfigError, match="verifiers"):
        make_trainer({"verifiers": {"turn 1": "math"}})
    with pytest.raises(DataError, match=r"verifiers\.digits: .*'0'"):
        make_trainer({"verifiers": {"digits": {"name": "label", "labels": ["a", "b"]}}})
