"""Installation, commands, publish, choosing, FAQ and security: every command and block of these pages is run, or its
line says what it needs: a package index, the hub, a GPU, a cluster or a container engine.

A page is one shell script: its blocks in their order, from the root of a checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from rlvr.__main__ import COMMANDS
from rlvr.config.config_loading import load_config

PAGES = ("installation", "commands", "publish", "choosing", "faq", "security")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"#\s*(index|hub|gpu|cluster|container)\b")
ROW = re.compile(r"^\| `(\w+)` \| .* \| `(rlvr [^`]+)` \|$", re.MULTILINE)
# Commands whose exit code 1 is a result: the runs differ, a trick was accepted, a package of this machine is missing.
MAY_FIND = re.compile(r"^rlvr (diff|audit|doctor)\b")


@pytest.fixture
def page(root):
    """The text of a page by its name."""
    return lambda name: (root / f"docs/{name}.md").read_text(encoding="utf-8")


def commands(block: str) -> list[str]:
    """The commands of a bash block; one that continues on the next line is whole."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def script_of(text: str) -> list[str]:
    """What is run of a page."""
    lines = []
    for _, example in ROW.findall(text):
        lines.append(example)
        if example.startswith("rlvr new "):
            lines.append(f"cd {example.split()[-1]}")
    for language, block in BLOCK.findall(text):
        if language == "python":
            lines.append(f"python - <<'PYTHON'\n{block}PYTHON")
        elif language == "bash":
            lines += [line for line in commands(block) if not NEEDS.search(line)]
    return [f"{line.partition(' #')[0]} || test $? = 1" if MAY_FIND.match(line) else line for line in lines]


@pytest.fixture
def run_page(root, page, tmp_path):
    """A function that runs a page in a folder with the scripts and configurations of a checkout."""

    def run(name: str) -> str:
        programs = tmp_path / "bin"
        programs.mkdir()
        # As pip installs them, for this interpreter.
        for program, module in (("rlvr", "-m rlvr"), ("python", "")):
            (programs / program).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (programs / program).chmod(0o755)
        work = tmp_path / "checkout"
        work.mkdir()
        for part in ("configs", "docs", "scripts"):
            (work / part).symlink_to(root / part)
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        script = "\n".join(["set -euxo pipefail", *script_of(page(name))])
        done = subprocess.run(
            ["bash", "-c", script], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


def test_the_table_has_every_command(page):
    rows = dict(ROW.findall(page("commands")))
    assert set(rows) == {*COMMANDS, "completion"}
    assert all(example.startswith(f"rlvr {name}") for name, example in rows.items())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_run(run_page, name):
    printed = run_page(name)
    if name == "commands":
        assert "usage: rlvr merge" in printed
        assert "model.safetensors" in printed


@pytest.mark.parametrize("name", PAGES)
def test_blocks_are_of_kinds_that_are_run(page, name):
    languages = {language for language, _ in BLOCK.findall(page(name))}
    assert languages <= {"bash", "yaml", "python"}
    assert "bash" in languages


@pytest.mark.parametrize("name", PAGES)
def test_yaml_is_a_configuration(page, name):
    for language, block in BLOCK.findall(page(name)):
        if language == "yaml":
            load_config(yaml.safe_load(block))


def test_extras_and_files_of_the_installation_exist(root, page):
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    text = page("installation")
    listed = {
        name for row in re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", row)
    }
    assert listed == extras
    for given in re.findall(r"(?:environment\.sh |EXTRAS=|rlvr\[)([a-z][\w,-]*)[\]\s`]", text):
        assert set(given.split(",")) <= extras, given


def test_the_docker_file_names_what_is_there(root):
    text = (root / "docker/Dockerfile").read_text(encoding="utf-8")
    for path in re.findall(r"\b(?:scripts|docs|docker)/[\w./]+\w", text):
        assert (root / path).exists(), path
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert set(",".join(re.findall(r"EXTRAS=([\w,-]+)", text)).split(",")) <= extras
    minor = int(re.search(r"^FROM python:3\.(\d+)-slim$", text, re.MULTILINE)[1])
    assert minor >= int(project["requires-python"].removeprefix(">=3."))
    ignored = (root / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".venv", "runs", ".git"} <= set(ignored)


def test_the_table_of_published_runs_is_that_of_the_configurations(root, page):
    rows = re.findall(
        r"^\| ([^|]+) \| [\d.]+B \| ([\de-]+) \| ([\d,]+) x (\d+) \| ([\d,]+) \| (\d+) \|$", page("choosing"), re.M
    )
    files = {
        "GRPO (DeepSeekMath)": "grpo",
        "Dr. GRPO": "dr-grpo",
        "DAPO": "dapo",
        "GSPO (verl's script)": "gspo",
        "RLOO (verl's script)": "rloo",
        "REINFORCE++ (verl's script)": "reinforce-plus-plus",
    }
    assert [row[0] for row in rows] == list(files)
    for name, lr, prompts, group, longest, updates in rows:
        config = load_config(root / f"configs/methods/{files[name]}.yaml")
        assert config.optim.lr == float(lr)
        assert config.optim.updates_per_batch == int(updates)
        rollout = config.rollout
        sizes = (rollout.prompts_per_step, rollout.group_size, rollout.max_new_tokens)
        assert sizes == (int(prompts.replace(",", "")), int(group), int(longest.replace(",", "")))


def test_the_table_of_mixed_groups_is_arithmetic(page):
    rows = re.findall(
        r"^\| (0\.\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page("choosing"), re.MULTILINE
    )
    assert len(rows) == 3
    for row in rows:
        p, *shares = map(float, row)
        for n, share in zip((4, 8, 16, 64), shares, strict=True):
            assert share == pytest.approx(1 - p**n - (1 - p) ** n, abs=0.0051)
