"""Runs side by side: means against loops over hand-written metrics, sweeps over seeds, and runs of the real trainer."""

from __future__ import annotations

import json

import pytest

from rlvr.analysis import main
from rlvr.analysis.run_dynamics import runs_table
from rlvr.errors import DataError
from rlvr.evaluation import TaskResult
from rlvr.trainer import GRPOTrainer


def written(folder, entropies, clipped=0.0, evaluations=()):
    """A run folder with a supervised step, a step for each entropy, and evaluations of two tasks."""
    folder.mkdir(parents=True)
    rows = [{"step": 1, "reward/mean": None, "entropy": 99.0, "grad_norm": 99.0}]
    rows += [
        {
            "step": 2 + n,
            "reward/mean": 0.5,
            "entropy": entropy,
            "ratio/clipped_low": 0.0,
            "ratio/clipped_high": clipped,
            "grad_norm": 1.0 + n % 2,
            "completion/length_mean": 10.0 * (n + 1),
        }
        for n, entropy in enumerate(entropies)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evaluations").mkdir()
    for step, scores in enumerate(evaluations):
        tasks = [TaskResult(f"t{n}", None, None, 4, 0, score).to_json() for n, score in enumerate(scores)]
        (folder / f"evaluations/step-{step:06d}.json").write_text(json.dumps({"step": step, "by_task": tasks}))
    return folder


def cells(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_ends_are_means_over_the_window_and_supervised_steps_do_not_count(tmp_path):
    run = written(tmp_path / "run", [4.0, 3.0, 2.0, 1.0], 0.2, [(0.2, 0.4), (0.9, 0.9), (0.4, 0.4)])
    (row,) = cells(runs_table([run], window=2))
    assert (row["run"], row["steps"]) == ("run", 4)
    assert (row["entropy first"], row["entropy last"], row["entropy change"]) == (3.5, 1.5, -2.0)
    assert row["clipped high"] == pytest.approx(0.2) and row["clipped low"] == 0.0
    assert row["grad norm largest"] == 2.0 and row["length last"] == 35.0
    # The first and the last evaluation, not the best.
    assert row["mean at start"] == pytest.approx(0.3) and row["mean at end"] == pytest.approx(0.4)
    assert row["mean change"] == pytest.approx(0.1)
    low, high = row["mean change 95 %"]
    assert low == pytest.approx(0.0) and high == pytest.approx(0.2)


def test_seeds_of_a_sweep_have_a_row_each_and_one_of_means(tmp_path):
    for seed, last in ((0, 1.0), (1, 3.0)):
        written(tmp_path / f"random/seed-{seed}", [2.0, last])
    (tmp_path / "random/seeds.json").write_text("{}")
    first, second, both = cells(runs_table([tmp_path / "random"], window=1))
    assert (first["run"], second["run"], both["run"]) == ("random/seed-0", "random/seed-1", "random: 2 seeds")
    assert (first["entropy change"], second["entropy change"], both["entropy change"]) == (-1.0, 1.0, 0.0)
    assert both["mean at start"] is None


def test_a_folder_without_a_step_of_reinforcement_or_a_metric_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no step of reinforcement"):
        runs_table([written(tmp_path / "sft", [])])
    run = written(tmp_path / "run", [1.0], evaluations=[(0.5, 0.5), (0.5, 0.5)])
    with pytest.raises(DataError, match="has no greedy"):
        runs_table([run], "greedy")
    with pytest.raises(DataError, match=r"without --no-greedy"):
        runs_table([run], "greedy")
    with pytest.raises(DataError, match=r"there is no metric 'greedyy'; known: greedy, mean, pass@k"):
        runs_table([run], "greedyy")
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="is not a run folder"):
        runs_table([tmp_path / "other"])


def test_random_rewards_with_and_without_the_clip_in_the_real_trainer(make_tree, capsys):
    """With the clip some tokens are clipped in the later updates of a batch, without it none; the table has the very
    numbers of metrics.jsonl and of the trainer's own evaluations."""
    folders = []
    for clip in ("hard", "none"):
        over = {
            "run": {"steps": 4},
            "rewards": ["random"],
            "algorithm": {"loss": {"name": "clip", "clip": clip}},
            "optim": {"updates_per_batch": 2, "epochs_per_batch": 4, "lr": 5e-2},
            "evaluation": {"samples": 4, "k": [1]},
            "logging": {"rollouts": 0},
        }
        tree = make_tree(over, clip)
        tree["data"]["eval"] = tree["data"]["train"]
        with GRPOTrainer(config=tree) as trainer:
            rows = trainer.train()
        folders.append(f"{tree['run']['dir']}/{clip}")
    capsys.readouterr()
    assert main(["runs", *folders, "--json", "--window", "1"]) == 0
    hard, none = json.loads(capsys.readouterr().out)["rows"]
    assert hard["clipped high"] > 0 and hard["clipped low"] > 0
    assert not none["clipped high"] and not none["clipped low"]
    assert none["entropy first"] == rows[0]["entropy"] and none["entropy last"] == rows[-1]["entropy"]
    assert none["mean at end"] == pytest.approx(rows[-1]["eval/mean"])
    # Both begin with the same weights and the same responses.
    assert hard["entropy first"] == none["entropy first"] and hard["mean at start"] == none["mean at start"]
