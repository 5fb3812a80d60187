"""A command's output replaces an earlier output of the same command, and no other file."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from resume_helpers import make_tree, merged

from rlvr import GRPOTrainer, audit, evaluate, merge
from rlvr.config.config_loading import load_config
from rlvr.errors import ConfigError
from rlvr.replay.__main__ import main as replay
from rlvr.report.__main__ import main as report
from rlvr.train.sweep import sweep

ROOT = Path(__file__).resolve().parents[2]
MINE = '{"id": 1, "thesis": "mine"}\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one step, and its configuration file."""
    over = {"stages": [], "run": {"steps": 1}, "logging": {"console": "off"}, "evaluation": {"at_start": False}}
    tree = merged(make_tree(tmp_path_factory.mktemp("outputs"), "run", **over), {"verifier": "exact"})
    with GRPOTrainer(config=tree) as trainer:
        trainer.train()
    return trainer.folder.path


def evaluated(run, output):
    data = json.dumps([{"prompt": "1=?", "answer": "1"}])
    file = output.with_name("held-out.jsonl")
    file.write_text(json.dumps(json.loads(data)[0]) + "\n")
    model = next(run.glob("checkpoints/step-*/model"))
    arguments = ["--model", model, "--data", file, "--verifier", "exact", "--samples", 0, "--max-new-tokens", 2]
    return evaluate.main([*map(str, arguments), "--output", str(output)])


def audited(run, output):
    rows = output.with_name("rows.jsonl")
    rows.write_text(json.dumps({"completion": "1", "answer": "1"}) + "\n")
    return audit.main(["--verifier", "exact", "--input", str(rows), "--output", str(output), "--workers", "1"])


def replayed(run, output):
    return replay([str(run), "--rescore", "rewards=['verdict']", "--output", str(output)])


def reported(run, output):
    return report([str(run), "--output", str(output)])


@pytest.mark.parametrize("write", [evaluated, audited, replayed, reported])
def test_only_an_earlier_output_is_replaced(run, tmp_path, capsys, write):
    output = tmp_path / "out.json"
    output.write_text(MINE)
    assert write(run, output) == 2
    assert output.read_text() == MINE
    assert f"{output} exists and is not" in capsys.readouterr().err
    output.write_text("")
    for _ in range(2):
        assert write(run, output) == 0
        assert output.stat().st_size > 0


@pytest.mark.parametrize("write", [evaluated, audited, replayed, reported])
def test_a_folder_without_the_right_to_write_is_named_before_any_work(run, tmp_path, capsys, write, monkeypatch):
    closed = tmp_path / "closed"
    # Root may write everywhere, so the answer of the system is replaced.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *more: Path(path) != closed and access(path, *more))
    closed.mkdir()
    assert write(run, closed / "out.json") == 2
    assert f"cannot be written: there is no right to write to {closed}" in capsys.readouterr().err
    assert not (closed / "out.json").exists()


@pytest.mark.parametrize("write", [audited, replayed])
def test_an_output_that_fills_the_disk_is_named(run, tmp_path, capsys, write, monkeypatch):
    monkeypatch.setattr(
        type(tmp_path), "with_name", lambda self, name: tmp_path / name
    )  # of the inputs, beside the output
    assert write(run, Path("/dev/full")) == 1
    error = capsys.readouterr().err
    assert "/dev/full: No space left on device. The disk is full: free some space there and start again" in error
    assert "--resume" not in error


def test_steps_that_were_not_recorded_are_refused_with_those_that_were(run, tmp_path, capsys):
    gaps = tmp_path / "gaps"
    (gaps / "rollouts").mkdir(parents=True)
    for step in (1, 4, 5):
        (gaps / "rollouts" / f"step-{step:06d}.jsonl").write_text("")
    assert replay([str(gaps), "--steps", "3"]) == 2
    assert "none of these steps" in (error := capsys.readouterr().err)
    assert "there are 1, 4-5" in error


def test_a_merged_model_goes_into_a_new_folder_only(tmp_path, capsys):
    out = tmp_path / "base"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    assert merge.main([str(tmp_path / "adapter"), str(out)]) == 2
    assert "exists and is not empty: give a new folder" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == b"mine"


@pytest.mark.gate
def test_a_converted_model_goes_into_a_new_folder_only(tmp_path):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    script = [sys.executable, str(ROOT / "scripts" / "convert_zero_checkpoint.py"), str(tmp_path)]
    done = subprocess.run([*script, "--base", "b", "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "exists and is not empty: give a new folder for the model" in done.stderr
    assert (out / "model.safetensors").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["seed-1.yaml", "seeds.json"])
def test_a_sweep_writes_over_nothing_of_the_user_s(tmp_path, name):
    tree = merged(make_tree(tmp_path, "run"), {"run": {"seed": 0, "seeds": [1]}})
    path = tmp_path / "runs" / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text(MINE)
    with pytest.raises(ConfigError, match="exists and is not"):
        sweep(load_config(tree))
    assert [p.name for p in path.parent.iterdir()] == [name]
    assert path.read_text() == MINE


def test_the_site_replaces_no_other_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = subprocess.run([sys.executable, ROOT / "scripts" / "make_site.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "holds no site" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


def output_types(script):
    """(name, positional arguments, keyword arguments) of the type of each option of a script that names a file of
    results."""
    for call in ast.walk(ast.parse(script.read_text())):
        option = call.args[0] if isinstance(call, ast.Call) and call.args else None
        if isinstance(option, ast.Constant) and option.value in ("--output", "--out", "--json"):
            (kind,) = (keyword.value for keyword in call.keywords if keyword.arg == "type")
            assert isinstance(kind, ast.Call), script.name
            yield kind.func.id, [a.value for a in kind.args], {k.arg: k.value.value for k in kind.keywords}


def test_a_benchmark_replaces_no_file_but_an_earlier_result_of_its_own(tmp_path, monkeypatch):
    """Every script's option takes its committed result, and neither a user's file, another script's result, nor a
    page."""
    benchmarks = ROOT / "scripts" / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    from result_file import result_file

    result = {script.stem: list(output_types(script)) for script in benchmarks.glob("*.py")}
    checks = {name: result_file(*kinds[0][1], **kinds[0][2]) for name, kinds in result.items() if kinds}
    assert {kind for kinds in result.values() for kind, _, _ in kinds} == {"result_file"} and len(checks) >= 15
    mine = tmp_path / "mine.json"
    for name, check in checks.items():
        for content in (MINE, "[]", "[1]", "notes", json.dumps({"command": "x", "format": 1, "machine": "y"})):
            mine.write_text(content)
            with pytest.raises(Exception, match=r"mine\.json exists and is not a result of this benchmark of rlvr"):
                check(str(mine))
        for other in checks:
            if (committed := benchmarks / f"{other}.json").exists():
                copy = Path(shutil.copy(committed, tmp_path / f"{other}.json"))
                if other == name:
                    assert check(str(copy)) == copy
                else:
                    with pytest.raises(Exception, match="exists and is not"):
                        check(str(copy))
        assert check(str(tmp_path / "new.json")) == tmp_path / "new.json"
    (tmp_path / "new.md").write_text("# Mine")
    for name in ("growth", "speed"):
        with pytest.raises(Exception, match=r"new\.md exists and is not the page of this benchmark"):
            checks[name](str(tmp_path / "new.json"))
    mine.write_text(MINE)
    script = [sys.executable, benchmarks / "advantages.py", "--groups", "1", "--rounds", "1", "--out", mine]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and mine.read_text() == MINE
    assert f"error: argument --out: {mine} exists and is not a result of this benchmark of rlvr" in done.stderr
