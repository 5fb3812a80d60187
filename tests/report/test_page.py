"""What goes into the page, without a browser: the data is unpacked again as the page's script does."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import time
from typing import Any

import numpy as np
import pytest

from rlvr.errors import ConfigError, DataError
from rlvr.evaluation import TaskResult, write_task_results
from rlvr.monitor.health import MONITORS
from rlvr.monitor.recording import read_rollouts as read_back
from rlvr.report import write_report
from rlvr.report.__main__ import main
from rlvr.report.page import differences, experiment_of
from rlvr.report.sampled_rollouts import ends_of, histogram

from .conftest import write_run


def unpacked(path) -> dict[str, Any]:
    page = path.read_text(encoding="utf-8")
    (packed,) = re.findall(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_a_page_holds_the_run(make_run):
    data = unpacked(write_report([make_run(steps=6)]))
    (run,) = data["runs"]
    assert (run["name"], run["finished"], run["last_step"], run["seconds"]) == ("run", 6, 6, 12.0)
    assert run["steps"] == [0, *range(1, 7)]  # the evaluation before the first step has a place in the curves
    assert run["columns"]["eval/greedy"][:4] == [0.0, None, None, 0.5]
    assert run["columns"]["reward/mean"][-1] == 1.0
    assert "kl/ref" not in run["columns"]  # never measured
    assert run["notes"] == [] and run["stages"] == [["grpo", 1]]
    assert [e["step"] for e in run["evaluations"]] == [0, 3, 6]
    assert data["metrics"]["entropy"][0] == "nats"


def test_shown_rollouts_say_what_the_run_recorded(make_run):
    folder = make_run(steps=2, text="été 😀 {}")
    data = unpacked(write_report([folder]))
    assert len(data["rollouts"]) == 16
    rollouts, columns = read_back(folder / "rollouts" / "step-000002.jsonl")
    shown = [row for row in data["rollouts"] if row["step"] == 2]
    for row, rollout, advantage in zip(shown, rollouts, columns["advantage"], strict=True):
        assert row["text"] == rollout.text and data["prompts"][row["prompt"]] == rollout.task.prompt
        assert row["status"] == str(rollout.verdict.status) and row["reason"] == "compared"  # type: ignore[union-attr]
        assert row["advantage"] == pytest.approx(advantage)
        assert row["ends"] == list(range(1, len(rollout.text) + 1))
        assert row["logprob"] == [-500] * len(rollout.text)
        assert len(row["token_log_ratio"]) == len(rollout.text)
    lines = [json.loads(line) for line in (folder / "rollouts" / "step-000002.jsonl").read_text().splitlines()]
    assert shown[0]["token_log_ratio"] == [round(1000 * v) for v in lines[0]["tokens"]["log_ratio"]]


def test_the_update_is_recorded_per_token(tmp_path):
    """In a real run: 0 where one update follows the sampling, something else where several do."""
    from rlvr.trainer import GRPOTrainer

    config = {
        "run": {"dir": str(tmp_path), "name": "run", "steps": 2},
        "model": {"scratch": {"hidden_size": 16, "layers": 1, "intermediate_size": 16, "heads": 2, "context": 32}},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4, "ignore_eos": True},
        "optim": {"lr": 1e-2, "epochs_per_batch": 3},
        "logging": {"console": "off"},
    }
    tasks = [{"prompt": f"{k}+1=", "answer": "1"} for k in range(4)]
    with GRPOTrainer(None, tasks, lambda completion: float(len(set(completion))), config) as trainer:
        trainer.train()
        batch = trainer.batch
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000002.jsonl").read_text().splitlines()]
    assert batch is not None and len(lines) == len(batch)
    ratios = []
    for i, line in enumerate(lines):
        if batch.columns["advantage"][i] == 0:  # no gradient, no pass
            assert "log_ratio" not in line["tokens"]
            continue
        ratios += line["tokens"]["log_ratio"]
        assert len(line["tokens"]["log_ratio"]) == int(batch.rollouts[i].sampled.sum())
    assert 1e-3 < np.abs(ratios).max() < 5
    assert len(read_back(tmp_path / "run/rollouts/step-000002.jsonl")[0]) == len(batch)


def test_of_many_rollouts_whole_groups_are_shown_and_the_rest_is_counted(make_run):
    folder = make_run(steps=10, groups=6, size=4)
    data = unpacked(write_report([folder], rollouts=80))
    assert len(data["rollouts"]) == 80
    by_group: dict[str, int] = {}
    for row in data["rollouts"]:
        by_group[row["group"]] = by_group.get(row["group"], 0) + 1
    assert set(by_group.values()) == {4} and len({row["step"] for row in data["rollouts"]}) == 10
    assert data["notes"] == ["run: 80 of 240 rollouts that were read are shown"]
    lengths = data["runs"][0]["lengths"]
    assert sum(map(sum, lengths["counts"])) == 240  # what is not shown is counted all the same


def test_the_last_step_is_whole_and_demonstrations_take_little_of_the_page(make_run):
    folder = make_run(steps=20, groups=6, size=4)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The first half imitates: no reward, nothing sampled.
    rows = [{**row, "reward/mean": None} if row["step"] <= 10 else row for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = unpacked(write_report([folder], rollouts=100))["rollouts"]
    steps = [row["step"] for row in shown]
    assert steps == sorted(steps) and steps.count(20) == 24 and len(shown) <= 100
    assert 0 < sum(step <= 10 for step in steps) <= 12


def test_the_head_says_what_was_learned_with_intervals_and_what_it_ran_on(make_run):
    folder = make_run(steps=6)
    results = [TaskResult(f"t{n}", None, greedy=float(n < 60)) for n in range(100)]
    (folder / "evaluations").mkdir()
    write_task_results(folder / "evaluations" / "step-000006.json", results)
    environment = {
        "command": "rlvr train --config a.yaml",
        "versions": {"torch": "2.13.0"},
        "machine": "Linux, 2 cores",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    data = unpacked(write_report([folder]))
    (run,) = data["runs"]
    assert data["checks"] == len(MONITORS) and run["score"] == "eval/greedy"
    assert run["headline"].startswith("Held-out tasks (greedy): 0.0 % → ") and run["headline"].endswith("in 6 steps")
    assert [point[0] for point in run["points"]] == [0, 3, 6] and run["points"][0][2] is None
    low, high = run["points"][-1][2:]
    assert 0.45 < low < 0.6 < high < 0.75 and f"(95 %: {100 * low:.1f} % to" in run["headline"]
    facts = dict(run["facts"])
    assert (facts["command"], facts["versions"]) == ("rlvr train --config a.yaml", "torch 2.13.0")


@pytest.mark.parametrize(
    ("scores", "words", "binary"),
    [
        ([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)], "greedy, share right", True),
        # A single partial score, in whichever evaluation.
        ([(0.0, 0.0), (1.0, 0.5), (1.0, 1.0)], "greedy, mean score", False),
        ([(0.0, 0.0), (1.0, 0.0), (1.0, 0.25)], "greedy, mean score", False),
        # An undecided answer has no score, and says nothing.
        ([(0.0, 0.0), (1.0, None), (1.0, 1.0)], "greedy, share right", True),
        # An evaluation whose results by task are gone might have had partial scores.
        ([(0.0, 0.0), None, (1.0, 1.0)], "greedy", None),
        ([(0.5, 0.0), None, (1.0, 1.0)], "greedy, mean score", False),
    ],
)
def test_a_mean_is_called_a_share_right_only_where_every_score_is_0_or_1(make_run, scores, words, binary):
    folder = make_run(steps=6)
    (folder / "evaluations").mkdir()
    for step, of_tasks in zip((0, 3, 6), scores, strict=True):
        if of_tasks is not None:
            results = [TaskResult(f"t{n}", None, greedy=score) for n, score in enumerate(of_tasks)]
            write_task_results(folder / "evaluations" / f"step-{step:06d}.json", results)
    (run,) = unpacked(write_report([folder]))["runs"]
    assert run["headline"].startswith(f"Held-out tasks ({words}): 0.0 % → 60.0 %")
    assert run["binary"] is binary


def test_the_head_names_the_end_of_each_stage(make_run):
    folder = make_run(steps=6)

    def headline(*rows):
        lines = [json.dumps({"step": step, "stage": stage, "eval/greedy": value}) for step, stage, value in rows]
        (folder / "evaluations.jsonl").write_text("\n".join(lines))
        return unpacked(write_report([folder]))["runs"][0]["headline"]

    start, imitated = (0, "sft", 0.0), (2, "sft", 0.4)
    learned = [(4, "grpo", 0.5), (6, "grpo", 0.875)]
    text = "0.0 % before, 40.0 % after SFT, 87.5 % after GRPO"
    assert headline(start, (1, "sft", 0.2), imitated, *learned) == f"Held-out tasks (greedy): {text} in 6 steps"
    # One stage, no evaluation before it, or more stages than a sentence holds: the two ends.
    assert headline((0, "grpo", 0.0), *learned) == "Held-out tasks (greedy): 0.0 % → 87.5 % in 6 steps"
    assert headline(imitated, *learned) == "Held-out tasks (greedy): 40.0 % → 87.5 % in 6 steps"
    many = [(step, f"stage-{step}", step / 10) for step in range(1, 7)]
    assert headline(start, *many) == "Held-out tasks (greedy): 0.0 % → 60.0 % in 6 steps"


def test_a_run_without_evaluations_has_a_headline_too(make_run):
    folder = make_run(steps=4)
    (folder / "evaluations.jsonl").unlink()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = unpacked(write_report([folder]))["runs"]
    assert run["headline"] == "Reward 0.25 → 1 in 4 steps; held-out tasks were not evaluated" and run["points"] == []


def test_only_so_much_is_read_and_that_is_said(make_run, monkeypatch):
    folder = make_run(steps=40)
    monkeypatch.setattr("rlvr.report.page.BYTES", sum(f.stat().st_size for f in (folder / "rollouts").iterdir()) // 4)
    data = unpacked(write_report([folder]))
    steps = sorted({row["step"] for row in data["rollouts"]})
    assert 8 <= len(steps) <= 10 and (steps[0], steps[-1]) == (1, 40)
    assert f"read were {len(steps)} of 40 recorded steps" in data["notes"][0]


def test_a_page_is_never_too_large(make_run, monkeypatch):
    monkeypatch.setattr("rlvr.report.page.LARGEST", 12_000)
    data = unpacked(write_report([make_run(steps=40)]))
    assert 0 < len(data["rollouts"]) < 320
    assert re.search(r"of these, [\d,]+ are shown", data["notes"][-1])


def test_many_steps_are_averaged(make_run):
    data = unpacked(write_report([make_run(steps=4000, every=1000)]))
    (run,) = data["runs"]
    assert len(run["steps"]) < 1500 + 1 and run["steps"][-1] == 4000
    assert run["columns"]["reward/mean"][1] == pytest.approx(np.mean([1, 2, 3]) / 4000, rel=1e-4)
    assert "each point is the mean of 3 steps" in run["notes"][0]


def test_seeds_belong_together_and_what_differs_is_listed(make_run):
    folders = [make_run("a", seed=0), make_run("b", seed=1), make_run("c", overrides=("optim.lr=0.1",))]
    data = unpacked(write_report(folders))
    a, b, c = (run["experiment"] for run in data["runs"])
    assert a == b != c
    rows = {row["key"]: row["values"] for row in data["differences"]}
    assert rows == {"run.seed": ["0", "1", "0"], "optim.lr": ["1e-06", "1e-06", "0.1"]}


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / place / "run") for place in "xy"]
    assert [run["name"] for run in unpacked(write_report(folders))["runs"]] == ["run (1)", "run (2)"]


def test_differences_of_trees():
    trees = [{"x": {"y": 1, "z": [1, 2]}, "stages": [{"steps": 1}]}, {"x": {"y": 1, "z": [1]}, "stages": []}]
    rows = {row["key"]: row["values"] for row in differences(trees)}
    assert rows == {"x.z": ["[1, 2]", "[1]"], "stages[0].steps": ["1", ""], "stages": ["", "[]"]}
    assert experiment_of({"run": {"seed": 1}, "a": 1}) == experiment_of({"run": {"seed": 2}, "a": 1})
    assert experiment_of({"a": 1}) != experiment_of({"a": 2})


@pytest.mark.parametrize(
    ("text", "pieces", "ends"),
    [
        ("abc", ["a", "b", "c"], [1, 2, 3]),
        ("a 😀b", ["a", " ", "\ufffd", "\ufffd", "b"], [1, 2, 2, 2, 4]),
        ("Hello world", ["Hello", "world"], [5, 11]),  # a tokenizer that swallows the space of a lone token
        ("ab", ["a", "b", ""], [1, 2, 2]),  # the end-of-sequence token has no text
        ("ab", ["a", "nothing of it", "b"], [1, 1, 2]),
        ("", ["x"], [0]),
    ],
)
def test_tokens_find_their_characters(text, pieces, ends):
    assert ends_of(text, range(len(pieces)), lambda token: pieces[token]) == ends


def test_a_histogram_counts_everything_once():
    random = np.random.default_rng(0)
    by_step = {step: random.normal(step, 3, random.integers(1, 9)).tolist() for step in range(1, 200)}
    data = histogram(by_step)
    assert data is not None
    assert sum(map(sum, data["counts"])) == sum(map(len, by_step.values()))
    assert [a for a, _ in data["steps"]] == [1, *(b + 1 for _, b in data["steps"][:-1])]
    one = histogram({3: [7.0, 7.0]})
    assert one is not None and sum(one["counts"][0]) == 2 and all(map(math.isfinite, one["edges"]))
    assert histogram({}) is None


# bad input


def test_torn_and_foreign_lines_cost_what_they_hold(make_run):
    folder = make_run(steps=5)
    whole = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(
        "\n".join([*whole[:3], "\x00\ufffd", "[1]", '{"no": "step"}', whole[3][:100]])
    )
    rollouts = folder / "rollouts" / "step-000002.jsonl"
    rollouts.write_text(rollouts.read_text() + '{"id": "torn')
    (folder / "health.jsonl").write_text('{"step": 1, "of": "another version"}\n')
    data = unpacked(write_report([folder]))
    assert data["runs"][0]["finished"] == 3
    assert any("metrics.jsonl: 3 lines could not be read" in note for note in data["runs"][0]["notes"])
    assert any("another version" in note for note in data["runs"][0]["notes"])
    assert "1 lines could not be read" in data["notes"][0]


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "evaluations.jsonl", "rollouts", "checkpoints"])
def test_whatever_is_missing_the_rest_is_shown(make_run, missing):
    folder = make_run(steps=4)
    (folder / missing).rename(folder.parent / "aside")
    data = unpacked(write_report([folder]))
    assert data["runs"][0]["finished"] == (0 if missing == "metrics.jsonl" else 4)
    assert len(data["rollouts"]) == (0 if missing == "rollouts" else 32)
    assert all(("ends" in row) == (missing != "checkpoints") for row in data["rollouts"])
    if missing in ("config.yaml", "metrics.jsonl", "rollouts"):
        assert any(missing in note for note in data["runs"][0]["notes"])


def test_a_run_of_an_older_version_is_read(make_run):
    """Fewer keys, other types, no health, rollouts without what was added since."""
    folder = make_run(steps=3)
    rows = [{"step": k, "reward/mean": k / 10, "run/stage": None, "odd": [1], "old": "text"} for k in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in (folder / "rollouts").iterdir():
        old = [json.loads(line) for line in file.read_text().splitlines()]
        for row in old:
            del row["tokens"], row["columns"]["advantage"]
        file.write_text("".join(json.dumps(row) + "\n" for row in old))
    data = unpacked(write_report([folder]))
    assert data["runs"][0]["columns"]["reward/mean"][-3:] == [0.1, 0.2, 0.3]
    assert len(data["rollouts"]) == 24


def test_the_command(make_run, tmp_path, capsys):
    folder = make_run(steps=2)
    assert main([str(folder), "--output", str(tmp_path / "deep" / "page.html")]) == 0
    assert (tmp_path / "deep" / "page.html").is_file() and "page.html" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(folder), "--output", str(tmp_path / "file" / "page.html")]) == 2
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(DataError):
        write_report([tmp_path / "deep"])
    with pytest.raises(ConfigError):
        write_report([folder], tmp_path / "file" / "page.html")


def test_text_of_a_model_cannot_leave_its_place(make_run):
    hostile = "</script><script>boom()</script>" + "{}"
    folder = make_run(steps=1, text=hostile)
    page = write_report([folder]).read_text()
    assert "boom" not in page
    assert page.count("</script>") == 2


def test_a_thousand_steps_take_less_than_ten_seconds(make_run):
    folder = make_run(steps=1000, every=10)
    began = time.process_time()
    path = write_report([folder])
    assert time.process_time() - began < 10
    assert path.stat().st_size < 5e6


@pytest.mark.slow
def test_a_hundred_thousand_rollouts_stay_under_twenty_megabytes(tmp_path):
    folder = write_run(tmp_path / "run", steps=1000, groups=20, size=5, text="abcdefghij" * 6 + "{}")
    began = time.process_time()
    path = write_report([folder])
    assert time.process_time() - began < 20
    assert path.stat().st_size < 20e6
    assert unpacked(path)["notes"][0].startswith("run: 2,500 of ")


def test_the_end_of_a_run_writes_the_page_and_a_fault_of_it_costs_nothing(tmp_path, monkeypatch, caplog, capsys):
    from rlvr import train

    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{k}+1=", "answer": "1"}) + "\n" for k in range(4))
    )
    (tmp_path / "c.yaml").write_text(
        "model: {scratch: {hidden_size: 16, layers: 1, intermediate_size: 16, heads: 2, context: 32}}\n"
        "rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 4}\nverifier: exact\nlogging: {console: plain}\n"
        f"data: {{train: {tmp_path / 'tasks.jsonl'}}}\nrun: {{dir: {tmp_path}, steps: 2}}\n"
    )
    assert train.main(["--config", str(tmp_path / "c.yaml"), "run.name=one"]) == 0
    assert "report.html" in capsys.readouterr().out
    data = unpacked(tmp_path / "one" / "report.html")
    assert data["runs"][0]["finished"] == 2 and len(data["rollouts"]) == 8 and data["runs"][0]["notes"] == []

    def broken(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr("rlvr.train.report_at_end.write_report", broken)
    assert train.main(["--config", str(tmp_path / "c.yaml"), "run.name=two"]) == 0
    assert "no ink" in caplog.text
