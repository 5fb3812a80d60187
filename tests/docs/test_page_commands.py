"""Every command and code block of README and docs is run by a test, or its line says what it needs: a package index,
the hub, a GPU, a cluster or a container engine.

A page of PAGES is one shell script here: its blocks in their order, in a folder with the scripts and configurations of
a checkout. ELSEWHERE names the tests that run the other blocks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_blocks import TYPED, Block, blocks, pages, without_mark
from page_inputs import BEFORE, prepare, shortened, write_shown_files

from rlvr.__main__ import COMMANDS
from rlvr.config.config_loading import load_config

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/analysis.md",
    "docs/api.md",
    "docs/choosing.md",
    "docs/code.md",
    "docs/commands.md",
    "docs/curves/README.md",
    "docs/distributed.md",
    "docs/evaluation.md",
    "docs/faq.md",
    "docs/from-trl.md",
    "docs/from-verl.md",
    "docs/installation.md",
    "docs/papers.md",
    "docs/performance.md",
    "docs/publish.md",
    "docs/quickstart.md",
    "docs/replay.md",
    "docs/resume.md",
    "docs/rollouts.md",
    "docs/security.md",
    "docs/shapes.md",
    "docs/trackers.md",
    "docs/verifiers.md",
)
ELSEWHERE = {
    ("docs/algorithms.md", "python"): ("tests/docs/test_algorithms_page.py", 2),
    ("docs/analysis.md", "bash"): ("tests/recipes/test_analysis_recipes.py", 25),
    ("docs/architecture.md", "layers"): ("tests/docs/test_layers.py", 1),
    ("docs/curves/mechanisms/README.md", "bash"): ("tests/docs/test_mechanism_curves.py", 1),
    ("docs/extending.md", "python"): ("tests/docs/test_extending.py", 15),
    ("docs/from-trl.md", "python"): ("tests/docs/test_links.py", 1),
    ("docs/gallery.md", "bash"): ("tests/docs/test_gallery.py", 12),
    ("docs/gpu.md", "bash"): ("tests/gpu_kit/test_runner.py", 3),
    ("docs/howto/lora.md", "bash"): ("tests/docs/test_howto.py", 1),
    ("docs/howto/own-data.md", "json"): ("tests/docs/test_howto.py", 3),
    ("docs/howto/own-verifier.md", "json"): ("tests/docs/test_howto.py", 1),
    ("docs/howto/own-verifier.md", "python"): ("tests/docs/test_howto.py", 1),
    ("docs/howto/several-gpus.md", "bash"): ("tests/docs/test_howto.py", 1),
    ("docs/judges.md", "python"): ("tests/docs/test_judges_page.py", 2),
    ("docs/memory.md", ""): ("tests/docs/test_generated_pages.py", 1),
    ("docs/one-file.md", "bash"): ("tests/docs/test_one_file.py", 1),
    ("docs/one-file.md", "python"): ("tests/docs/test_one_file.py", 8),
    ("docs/python.md", "python"): ("tests/docs/test_python_page.py", 4),
    ("docs/verifiers.md", "python"): ("tests/docs/test_verifier_page.py", 6),
}
"""By page and language: the test that runs the blocks, and their number (of bash: of the commands without a mark)."""

AFTER = {"docs/analysis.md": "## The tiny run", "docs/from-trl.md": "With rlvr, by TRL's names"}
"""By page: where the part begins that is run here, if the blocks before it are run elsewhere."""

ROW = re.compile(r"^\| `(\w+)` \| .* \| `(rlvr [^`]+)` \|$", re.MULTILINE)
# Commands whose exit code 1 is a result: the runs differ, a trick was accepted, a package of this machine is missing.
MAY_FIND = re.compile(r"^(?:rlvr |python -m rlvr\.)(diff|audit|doctor)\b")


@pytest.fixture
def page(root):
    """The text of a page of docs by its name."""
    return lambda name: (root / f"docs/{name}.md").read_text(encoding="utf-8")


def script_of(name: str, text: str) -> list[str]:
    """What is run of a page."""
    lines = []
    for _, example in ROW.findall(text):
        lines.append(example)
        if example.startswith("rlvr new "):
            lines.append(f"cd {example.split()[-1]}")
    for block in of_this_file(name, text):
        if block.language == "python":
            code = BEFORE.get(name, "") + shortened(name, block.text)
            lines.append(f"python - <<'PYTHON'\n{code}PYTHON")
        else:
            lines += [shortened(name, command) for command in without_mark(block.text)]
    return [f"{line.partition(' #')[0]} || test $? = 1" if MAY_FIND.match(line) else line for line in lines]


def of_this_file(name: str, text: str) -> Iterator[Block]:
    """The blocks of commands and Python code that are run here."""
    skipped = set() if name in AFTER else {language for page, language in ELSEWHERE if page == name}
    for block in blocks(text.partition(AFTER[name])[2] if name in AFTER else text):
        if block.language in {"bash", "python"} - skipped:
            yield block


@pytest.fixture
def run_page(root, tmp_path):
    """A function that runs a page in a folder with the scripts and configurations of a checkout."""

    def run(name: str) -> str:
        text = (root / name).read_text(encoding="utf-8")
        work = tmp_path / "checkout"
        programs = work / ".venv/bin"
        programs.mkdir(parents=True)
        # As pip installs them, for this interpreter.
        named = (("rlvr", "-m rlvr"), ("python", ""), ("torchrun", "-m torch.distributed.run"))
        for program, module in named:
            (programs / program).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (programs / program).chmod(0o755)
        (programs / "activate").touch()
        for part in ("configs", "docs", "scripts"):
            (work / part).symlink_to(root / part)
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        before = prepare(work, name, text, "rlvr train")
        script = "\n".join(["set -euxo pipefail", *before, *script_of(name, text)])
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
    if name == "docs/commands.md":
        assert "usage: rlvr merge" in printed
        assert "model.safetensors" in printed


def not_run_here(text: str, name: str) -> Counter:
    """The blocks of a page by language that neither this file runs nor a mark exempts; of bash, the commands."""
    found = Counter()
    for block in blocks(text):
        if block.language == "bash":
            found["bash"] += len(without_mark(block.text))
        elif block.language or TYPED.search(block.text):
            found[block.language] += 1
    found.pop("yaml", None)  # test_yaml_is_a_configuration
    if name in PAGES:
        for block in of_this_file(name, text):
            found[block.language] -= len(without_mark(block.text)) if block.language == "bash" else 1
    return +found


def test_every_block_is_run_by_a_test_or_marked(root):
    """A new block fails here: add its page to PAGES, a test to ELSEWHERE, or a mark such as `# hub` to its line."""
    names = pages(root)
    found = {}
    for name in names:
        rest = not_run_here((root / name).read_text(encoding="utf-8"), name)
        found |= {(name, language): number for language, number in rest.items()}
    assert found == {key: number for key, (_, number) in ELSEWHERE.items()}
    assert set(PAGES) <= set(names)
    for (name, _), (test, _) in ELSEWHERE.items():
        tested = (root / test).read_text(encoding="utf-8")
        page = Path(name)
        assert (page.parent.as_posix() if page.name == "README.md" else page.name) in tested, test


@pytest.mark.parametrize(
    "written",
    ["```bash\nrlvr new x\n```\n", "```\nrlvr new x\n```\n", "```python\n1\n```\n", "```toml\na = 1\n```\n"],
)
def test_a_new_block_is_seen(written):
    assert sum(not_run_here(written, "docs/new.md").values()) == 1


@pytest.mark.parametrize("need", ["index", "hub", "gpu, or a long wait", "cluster", "container: docker"])
def test_a_mark_says_what_a_command_needs(need):
    assert not not_run_here(f"```bash\nrlvr new x   # {need}\n```\n", "docs/new.md")
    assert not_run_here(f"```bash\nrlvr new x   # github, {need}\n```\n", "docs/new.md")


def test_yaml_is_a_configuration(root, tmp_path, monkeypatch):
    """Of every page, read as a file is; the files that the page shows are there."""
    for name in pages(root):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for part in ("configs", "docs", "scripts"):
            (folder / part).symlink_to(root / part)
        monkeypatch.chdir(folder)
        text = (root / name).read_text(encoding="utf-8")
        write_shown_files(folder, text)
        for block in blocks(text):
            if block.language == "yaml":
                (folder / "block.yaml").write_text(block.text, encoding="utf-8")
                load_config("block.yaml")


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
