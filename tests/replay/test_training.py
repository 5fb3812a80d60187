"""Training from recorded rollouts: the recorded run's updates bit for bit, other methods on them, and what is
refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from replay_helpers import files, timeless

from rlvr.errors import ConfigError, DataError
from rlvr.trainer import GRPOTrainer
from small_run import changed, lines, overlaid, weights

SETTINGS = {
    "plain": {},
    "several updates": {"optim": {"updates_per_batch": 2, "epochs_per_batch": 2}},
    "dynamic_sampling": {
        "run": {"steps": 4},
        "rollout": {"dynamic_sampling": {"attempts": 4}, "max_new_tokens": 1, "group_size": 2},
    },
    "selection": {"algorithm": {"select": ["PIECES:first_of_group"]}, "rewards": ["verdict", "PIECES:longer"]},
    "selection after": {"algorithm": {"select": ["PIECES:first_of_group"], "select_after": True}},
    "undecided": {"verifier": "PIECES:starts_even"},
    "penalised reward": {
        "algorithm": {"kl": {"coef": 0.1, "where": "reward"}},
        "rewards": ["verdict", "PIECES:longer"],
    },
    "baseline": {
        "rollout": {"plan": {"name": "single_turn", "baseline": "greedy"}},
        "algorithm": {"advantage": {"name": "group", "baseline": "greedy", "scale": "none"}},
    },
    "staleness": {"run": {"steps": 4}, "rollout": {"staleness": 1}},
    "copied weights": {"rollout": {"engine": {"name": "hf", "copy_weights": True}}},
    "turns": {"rollout": {"plan": {"name": "turns", "environment": "PIECES:Adds"}, "max_new_tokens": 4}},
    "demonstrations": {"algorithm": {"auxiliary": [{"name": "likelihood", "on": "demonstrations", "coef": 0.5}]}},
    "stages": {"stages": [{"kind": "sft", "steps": 1}, {"kind": "grpo", "steps": 2}]},
    "entropy term": {"rewards": ["verdict", {"name": "self_certainty", "weight": 0.1}]},
    "warm": {"rollout": {"temperature": {"schedule": "linear", "start": 1.3, "end": 0.7}}},
    "chance": {"verifier": "PIECES:chance"},
    # Scores of tokens, which a run that takes recorded rewards does not compute again.
    "spans": {
        "rewards": ["verdict", {"name": "repeated_tokens", "n": 1}],
        "algorithm": {"advantage": {"name": "spans", "terms": {"repeated_tokens": {"per": "token", "discount": 0.5}}}},
    },
}


def of(setting, pieces):
    """The setting with the path of the user's pieces in it."""
    if isinstance(setting, dict):
        return {key: of(value, pieces) for key, value in setting.items()}
    if isinstance(setting, list):
        return [of(value, pieces) for value in setting]
    return setting.replace("PIECES", str(pieces)) if isinstance(setting, str) else setting


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_updates_of_the_recorded_run_come_again_bit_for_bit(run, again, pieces, setting):
    over = of(SETTINGS[setting], pieces)
    first = run(over, "first")
    second = again(first, over)
    assert changed(first.start, weights(first))
    assert changed(weights(first), weights(second)) == []
    ahead = ["run/epoch"] if setting == "staleness" else []  # whose sampler is ahead of what trains
    assert timeless(first.metrics, *ahead) == timeless(second.metrics, *ahead)
    for one, other in zip(files(first.folder.path), files(second.folder.path), strict=True):
        assert lines(one) == lines(other)


def test_entropy_is_that_of_the_policy_that_trains(run, again):
    """Not of the one that was recorded, which no update changes: controllers follow it."""
    first = run({"run": {"steps": 5}}, "first")
    sampled = [row["entropy"] for row in first.metrics]
    target = float(np.mean(sampled))
    follows = {"metric": "entropy", "target": target, "initial": 0.1, "delta": -0.01}
    over = {"run": {"steps": 5}, "optim": {"lr": 0.05}, "algorithm": {"entropy": follows}}
    rows = again(first, over).metrics
    now = [row["entropy/trained"] for row in rows]
    assert [row["entropy"] for row in rows] == now
    assert [value > target for value in now] != [value > target for value in sampled], "the two cannot be told apart"
    moved = np.cumsum([0.1, *(-0.01 if value > target else 0.01 for value in now)])
    assert [row["schedule/entropy.coef"] for row in rows] == pytest.approx(moved[:-1])


def test_everything_that_was_collected_is_recorded(run, pieces):
    """What was trained, what a selector left out, what was dropped with its group, and what others are compared
    with."""
    over = {
        "run": {"steps": 4},
        "rollout": {"dynamic_sampling": {"attempts": 4}, "max_new_tokens": 1, "group_size": 3},
        "algorithm": {"select": [f"{pieces}:first_of_group"]},
    }
    over["rollout"]["plan"] = {"name": "single_turn", "baseline": "greedy"}
    trainer = run(over, "first")
    uses = []
    for path, row in zip(files(trainer.folder.path), trainer.metrics, strict=True):
        recorded = lines(path)
        uses += [line["use"] for line in recorded]
        assert sum(line["use"] == "dropped" for line in recorded) == row["rollout/dropped"]
        assert all(line["member"] == 1 for line in recorded if line["use"] == "left_out")
        assert all(line["role"] == "baseline" for line in recorded if line["use"] == "baseline")
        assert all(isinstance(line["columns"]["reward"], float) for line in recorded)
        rewards = [line["columns"]["reward"] for line in recorded if line["role"] != "baseline"]
        assert sum(rewards) / len(rewards) == pytest.approx(row["reward/mean"])
    assert set(uses) == {"trained", "left_out", "dropped", "baseline"}


def test_verdicts_are_not_given_again(run, again, pieces):
    """A verifier that says another number each time: as it was recorded, or, when asked, anew."""
    over = {"verifier": f"{pieces}:chance"}
    first = run(over, "first")
    second, third = again(first, over), again(first, over, "verified", rescore=True)
    assert [r.verdict.score for r in second.batch.rollouts] == [r.verdict.score for r in first.batch.rollouts]
    assert all(
        a.verdict.score != b.verdict.score for a, b in zip(third.batch.rollouts, first.batch.rollouts, strict=True)
    )
    assert [row["completion/length_mean"] for row in third.metrics] == [
        row["completion/length_mean"] for row in first.metrics
    ]
    assert changed(weights(first), weights(third))


def test_another_verifier_scores_them_again(run, again, pieces):
    first = run(name="first")
    over = {"verifier": f"{pieces}:starts_odd", "rewards": ["verdict", {"name": f"{pieces}:longer", "weight": 0.5}]}
    second = again(first, over, rescore=True)
    for rollout, reward in zip(second.batch.rollouts, second.batch.column("reward"), strict=True):
        odd = float(rollout.text[:1] in tuple("13579"))
        assert reward == pytest.approx(odd + 0.5 * rollout.completion_length / 6)
        assert list(rollout.verdicts) == ["starts_odd"]
    for key in ("verifier", "rewards"):
        with pytest.raises(ConfigError, match=rf"{key} is not that of the recorded run.*rescore=true"):
            again(first, {key: over[key]}, f"refused-{key}")


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "weighted_likelihood"},
        {"auxiliary": [{"name": "dpo", "coef": 1.0}], "loss_coef": 0.0},
        {"loss": "reinforce", "advantage": {"name": "group", "scale": "none"}},
    ],
    ids=["weighted_likelihood", "dpo", "reinforce"],
)
def test_other_methods_train_on_them_from_other_weights(run, again, algorithm):
    first = run({"run": {"steps": 4}}, "first")
    second = again(first, {"run": {"seed": 7}, "algorithm": algorithm}, "offline")
    assert changed(second.start, weights(second))
    assert changed(first.start, second.start)
    assert [r.token_ids.tolist() for r in second.batch.rollouts if r.role == "policy"] == [
        line["token_ids"] for line in lines(files(first.folder.path)[2])
    ]


def test_a_run_on_recorded_rollouts_is_stopped_and_resumed(run, again, make_tree):
    first = run({"run": {"steps": 5}}, "first")
    engine = {"rollout": {"engine": {"name": "recorded", "path": str(first.folder.path)}}}
    with GRPOTrainer(config=make_tree(overlaid(engine, {"run": {"steps": 5}}), "cut")) as cut:
        cut.train(2)
    with GRPOTrainer(config=make_tree(overlaid(engine, {"run": {"steps": 5}}), "cut")) as rest:
        rest.train(resume="auto")
        assert rest.step == 5
        assert changed(weights(first), weights(rest)) == []


def test_evaluations_sample(run, again, make_tree):
    evaluated = {"data": {"eval": make_tree()["data"]["train"]}, "evaluation": {"every": 1, "samples": 2}}
    first = run(evaluated, "first")
    second = again(first, evaluated)
    assert len(first.evaluations) == 4
    assert timeless(first.evaluations) == timeless(second.evaluations)


# what is refused


@pytest.fixture
def first(run):
    return run(name="first")


def edit(path, line, **values):
    """Change fields of one line of a file of rollouts; a function is of the value that there is."""
    rows = lines(path)
    for name, value in values.items():
        rows[line - 1][name] = value(rows[line - 1][name]) if callable(value) else value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_missing_steps_are_named_before_training(first, again):
    files(first.folder.path)[1].unlink()
    with pytest.raises(ConfigError, match=r"steps 2 of 1-3 are not among .*there are 1, 3.*run.steps"):
        again(first)
    assert not (first.folder.path.parent / "again").exists()


def test_more_steps_than_there_are(first, again):
    with pytest.raises(ConfigError, match=r"steps 4-9 of 1-9 .*there are 1-3"):
        again(first, {"run": {"steps": 9}})


def test_a_run_without_rollouts(run, again, tmp_path):
    silent = run({"logging": {"rollouts": 0}}, "silent")
    with pytest.raises(DataError, match=r"holds no recorded rollouts.*logging.rollouts"):
        again(silent)
    silent.folder.path = tmp_path / "nowhere"
    with pytest.raises(DataError, match=r"no run folder .*nowhere"):
        again(silent, name="nowhere-again")


def test_a_run_never_writes_over_what_it_reads(first, again):
    with pytest.raises(ConfigError, match=r"whose rollouts it reads: choose another run.name"):
        again(first, {"run": {"overwrite": True}}, "first")
    assert len(files(first.folder.path)) == 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"token_ids": lambda ids: [*ids[:-1], 4000]}, "token 4000 is beyond the model's vocabulary.*model.path"),
        ({"origin": lambda values: values[:-1]}, "not a rollout: ValueError"),
        ({"token_ids": "none"}, "not a rollout"),
    ],
    ids=["vocabulary", "lengths", "type"],
)
def test_a_line_that_cannot_be_trained_on_is_named(first, again, values, said):
    path = files(first.folder.path)[1]
    edit(path, 3, **values)
    with pytest.raises(DataError, match=rf"{path}, line 3: .*{said}"):
        again(first)


def test_a_file_that_is_cut_is_named(first, again):
    path = files(first.folder.path)[2]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=rf"{path}, line 8: not a rollout: it is cut.*copy"):
        again(first)


def test_rollouts_longer_than_the_context(run, again):
    first = run({"model": {"scratch": {"context": 64}}}, "first")
    with pytest.raises((DataError, ConfigError), match="context is 8: use a model with a longer one"):
        again(first, {"model": {"scratch": {"context": 8}}})


def test_another_tokenizer_is_noticed(first, again):
    with pytest.raises(DataError, match="another tokenizer"):
        again(first, {"model": {"scratch": {"alphabet": "=?9876543210 "}}})


def test_unknown_log_probs_are_refused_where_a_ratio_needs_them(first, again):
    for path in files(first.folder.path):
        edit(path, 2, behaviour_logprobs=lambda values: [None] * len(values))
    again(first, name="one update")
    with pytest.raises(DataError, match=r"line 2: the log-probs .* optim.updates_per_batch"):
        again(first, {"optim": {"epochs_per_batch": 2}}, "two")
    with pytest.raises(DataError, match=r"line 2: the log-probs .* algorithm.correction"):
        again(first, {}, "corrected", copy_weights=True)


def test_files_of_an_older_version_train(first, again):
    """Their lines do not say what became of a rollout."""
    for path in files(first.folder.path):
        rows = [{k: v for k, v in row.items() if k not in ("use", "scored")} for row in lines(path)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert changed(weights(first), weights(again(first))) == []
