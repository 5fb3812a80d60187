"""The wheel and the sdist: what is in them, and that the commands run from the wheel in an environment of its own.

The environment takes every other package from the one that runs the tests, by a .pth file whose own .pth files are not
read: `import rlvr` there finds the wheel, never the checkout. One slow test installs everything from the index.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from package_index import reason_to_skip
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlvr import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
SHARED = {"configs": ROOT / "configs", "examples": ROOT / "docs/examples"}
"""Folders of share/rlvr in the environment -> those of the checkout."""

pytestmark = [
    pytest.mark.gate,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds, is missing"),
]


def build(kind, source, folder):
    """The only file that hatchling builds of `source` in a new folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=200)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of an environment with the wheel, installed by pip without its dependencies."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    # With links, as `python -m venv` makes them: the sandbox shows the Python that they lead to.
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python")]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=200)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others), encoding="utf-8")
    return folder


def run(environment, *words, cwd, program="rlvr"):
    """The output of a program of the environment, in a folder outside the checkout."""
    # A PYTHONPATH of whoever runs the tests would go before the wheel.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(environment / "bin" / program), *words]
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
    return done.stdout


def files_of(wheel):
    """Name in the wheel -> content, without the list of files, which has an order of its own."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def files_under(folder):
    """The files of a folder of the checkout, relative to it, without Python's caches."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files}


def test_every_file_of_the_package_and_every_shared_file_is_in_the_wheel(wheel):
    names = set(files_of(wheel))
    package = {name.removeprefix("rlvr/") for name in names if name.startswith("rlvr/")}
    assert package == files_under(ROOT / "src/rlvr")
    shared = {name.partition(".data/data/share/rlvr/")[2] for name in names if ".data/data/" in name}
    assert shared == {f"{name}/{file}" for name, folder in SHARED.items() for file in files_under(folder)}
    # Named one by one: a list of files that is empty by mistake equals another one.
    parts = ["py.typed", "recipes/psr/psr.yaml", "recipes/hub_schemas.json", "new/template/run.yaml"]
    parts += ["report/static/report.html", "verifiers/code/sandbox/inside/supervisor.py"]
    assert set(parts) <= package
    assert {"configs/quickstart.yaml", "examples/grpo_in_one_file.py"} <= shared


def test_the_sdist_builds_the_same_wheel(wheel, tmp_path):
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    rebuilt = files_of(build("wheel", source, tmp_path / "rebuilt"))
    own = files_of(wheel)
    assert rebuilt.keys() == own.keys()
    assert [name for name in own if own[name] != rebuilt[name]] == []


def test_the_package_that_runs_is_that_of_the_wheel(environment, tmp_path):
    where = run(environment, "-c", "import rlvr; print(rlvr.__file__)", program="python", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment)
    assert run(environment, "--version", cwd=tmp_path) == f"rlvr {__version__}\n"
    assert "usage: rlvr COMMAND" in run(environment, "--help", cwd=tmp_path)


@pytest.mark.slow
def test_recipes_and_shipped_configurations_are_found_by_name(environment, tmp_path):
    recipes = {path.stem for path in (ROOT / "src/rlvr/recipes").glob("*/*.yaml")}
    listed = run(environment, "recipes", "list", cwd=tmp_path).splitlines()
    assert {line.split()[0] for line in listed} == recipes
    planned = run(environment, "train", "--config", "configs/quickstart.yaml", "--dry-run", cwd=tmp_path)
    assert "name: quickstart" in planned
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_finds_what_the_checkout_s_finds_and_names_commands_that_work_here(environment, tmp_path):
    command = [sys.executable, "-m", "rlvr.doctor", "--json"]
    of_checkout = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280).stdout
    there = {one["part"]: one for one in json.loads(of_checkout)}
    here = {one["part"]: one for one in json.loads(run(environment, "doctor", "--json", cwd=tmp_path))}
    assert here.keys() == there.keys()
    assert here["sandbox"]["found"] == there["sandbox"]["found"]
    lacking = {part: one["lacking"] for part, one in here.items() if part.startswith("[") and one["lacking"]}
    assert all(command == f"pip install 'rlvr{extra}'" for extra, command in lacking.items())


def test_programs_are_judged_in_the_sandbox_of_the_wheel(environment, tmp_path):
    task = {"prompt": "Add.", "answer": None, "info": {"kind": "asserts", "tests": ["assert add(2, 3) == 5"]}}
    program = "```python\ndef add(a, b):\n    return a {} b\n```"
    rows = [{**task, "id": sign, "completion": program.format(sign)} for sign in "+-"]
    (tmp_path / "programs.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows), encoding="utf-8")
    files = ["--input", "programs.jsonl", "--output", "verdicts.jsonl"]
    # Without bubblewrap the helpers run unconfined here: that they are found is what is tested.
    tier = [] if shutil.which("bwrap") else ["tier=none", "unsafe=true"]
    run(environment, "audit", "--verifier", "code", *tier, *files, cwd=tmp_path)
    verdicts = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert {one["id"]: one["status"] for one in verdicts} == {"+": "correct", "-": "wrong"}


def test_a_new_task_is_trained_for_two_steps_reported_and_evaluated(environment, tmp_path):
    run(environment, "new", "task", cwd=tmp_path)
    folder = tmp_path / "task"
    run(environment, "train", "--config", "run.yaml", "stages.0.steps=1", "stages.1.steps=1", cwd=folder)
    rows = [json.loads(row) for row in (folder / "runs/sort-digits/metrics.jsonl").read_text().splitlines()]
    assert [row["run/stage"] for row in rows] == ["sft", "grpo"]
    # The page is made of the package's own HTML, CSS and JavaScript.
    assert len((folder / "runs/sort-digits/report.html").read_text()) > 10_000
    asked = ["--model", "runs/sort-digits", "--samples", "2", "--limit", "4", "--output", "result.json"]
    run(environment, "evaluate", *asked, cwd=folder)
    assert len(json.loads((folder / "result.json").read_text())["by_task"]) == 4


@pytest.mark.slow
def test_a_recipe_takes_its_steps_at_toy_size(environment, tmp_path):
    lines = run(environment, "recipes", "smoke", "psr", cwd=tmp_path).splitlines()
    assert len(lines) >= 2
    assert all(re.match(r"psr: \w+ step \d+: reward/mean ", line) for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fresh_environment_with_the_pinned_packages_trains(wheel, tmp_path):
    """Nothing of the environment of the tests is in it: every package comes from the index, by pip."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "-c", str(ROOT / "scripts/constraints.txt"), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=1500)
    if done.returncode and (reason := reason_to_skip(done.stderr)):
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr[-3000:]
    versions = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found = json.loads(run(folder, "-c", versions, program="python", cwd=tmp_path))
    assert {"rlvr", "torch", "transformers"} <= set(found)
    assert [name for name in PINS if name in found and not PINS[name].contains(found[name], prereleases=True)] == []
    parts = {one["part"]: one for one in json.loads(run(folder, "doctor", "--json", cwd=tmp_path))}
    assert [part for part in ("torch", "transformers", "pydantic") if parts[part]["lacking"]] == []
    run(folder, "new", "task", cwd=tmp_path)
    steps = ["stages.0.steps=1", "stages.1.steps=1", "evaluation.at_start=false"]
    run(folder, "train", "--config", "run.yaml", *steps, cwd=tmp_path / "task")
    assert len((tmp_path / "task/runs/sort-digits/metrics.jsonl").read_text().splitlines()) == 2


def requirements(extra):
    """The packages of an extra, with those of the extras of ours that it names."""
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "rlvr":
            for name in sorted(requirement.extras):
                yield from requirements(name)
        else:
            yield requirement


PINS = {
    requirement.name: requirement.specifier
    for line in (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}


def versions_in_the_index(name):
    """The versions that pip could install here. The query downloads no package: builds for CUDA have gigabytes."""
    options = ["--disable-pip-version-check", "--retries", "0", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "index", "versions", *options, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if listed is None:
        pytest.skip(f"the package index that pip uses here has no {name}: {done.stderr.strip()[:200]}")
    return listed[1].split(", ")


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_every_package_of_an_extra_has_a_version_within_the_pins(extra):
    for requirement in requirements(extra):
        wanted = requirement.specifier & PINS.get(requirement.name, SpecifierSet())
        try:
            found = [metadata.version(requirement.name)]
        except metadata.PackageNotFoundError:
            found = versions_in_the_index(requirement.name)
        assert list(wanted.filter(found, prereleases=True)), f"{requirement.name}{wanted}: {', '.join(found)}"
