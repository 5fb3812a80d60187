"""CONTRIBUTING.md, the workflows, the forms for issues, pre-commit and the citation: they parse, and what they name is
there."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

import rlvr

LARGEST = 1_000_000
"""Bytes of a file in the repository, as CONTRIBUTING.md says."""


@pytest.fixture(scope="module")
def workflows(root):
    """The workflows by name."""
    paths = sorted((root / ".github/workflows").glob("*.yml"))
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths}


@pytest.fixture(scope="module")
def hooks(root):
    """The hooks of pre-commit by id."""
    (local,) = yaml.safe_load((root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert local["repo"] == "local"  # the versions in .venv, and no others
    return {hook["id"]: hook for hook in local["hooks"]}


def steps(workflow):
    """The steps of a workflow's jobs."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def scripts_of(text):
    """The files that a text runs by bash."""
    return set(re.findall(r"bash ((?:scripts/|\.ci/)[\w./-]+)", text))


def test_commands_that_are_named_are_there(root, workflows):
    texts = [(root / "CONTRIBUTING.md").read_text(encoding="utf-8")]
    texts += [step.get("run", "") for workflow in workflows.values() for step in steps(workflow)]
    for text in texts:
        assert [name for name in scripts_of(text) if not (root / name).is_file()] == []
    assert {"scripts/test.sh", ".ci/run", "scripts/environment.sh", "scripts/sandbox.sh"} <= scripts_of(texts[0])
    assert "--all" in (root / "scripts/test.sh").read_text(encoding="utf-8")
    assert "scripts/test.sh" in (root / ".ci/run").read_text(encoding="utf-8")


def test_the_workflows_run_the_gate_and_all_tests(root, workflows):
    assert set(workflows) == {"gate", "nightly"}
    # YAML 1.1 reads the key `on` as true.
    assert set(workflows["gate"][True]) == {"push", "pull_request"}
    assert set(workflows["nightly"][True]) == {"schedule", "workflow_dispatch"}
    assert "bash .ci/run" in [step.get("run") for step in steps(workflows["gate"])]
    (job,) = workflows["nightly"]["jobs"].values()
    assert "bash scripts/test.sh --all ${{ matrix.tests }}" in [step.get("run") for step in job["steps"]]
    tested = " ".join(job["strategy"]["matrix"]["tests"]).split()
    folders = {f"tests/{path.relative_to(root / 'tests').parts[0]}" for path in (root / "tests").rglob("test_*.py")}
    assert sorted(tested) == sorted(folders)


def test_workflows_may_read_only_and_end(workflows):
    for workflow in workflows.values():
        assert workflow["permissions"] == {"contents": "read"}
        assert workflow["concurrency"]["group"]
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] < 360  # the most that a hosted runner has
        for step in steps(workflow):
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", step.get("uses", "a/b@v1"))


def test_workflows_allow_what_the_sandbox_needs(root, workflows):
    setting = "kernel.apparmor_restrict_unprivileged_userns"
    assert setting in (root / "docs/code.md").read_text(encoding="utf-8")
    for workflow in workflows.values():
        commands = "".join(step.get("run", "") for step in steps(workflow))
        assert f"sysctl -w {setting}=0" in commands and "bubblewrap" in commands


def test_the_hooks_run_what_the_gate_runs_before_the_tests(root, hooks):
    script = (root / "scripts/test.sh").read_text(encoding="utf-8")
    checks = re.findall(r"^ *(\.venv/bin/(?:ruff|mypy).*) \|\| status=1$", script, re.MULTILINE)
    assert len(checks) == 3
    assert [hook["entry"] for name, hook in hooks.items() if name != "large-files"] == checks
    assert not any(hook["pass_filenames"] for name, hook in hooks.items() if name != "large-files")


def test_the_hook_refuses_a_large_file(hooks, tmp_path):
    small, large = tmp_path / "a small file", tmp_path / "large"
    small.write_bytes(b"0" * LARGEST)
    large.write_bytes(b"0" * (LARGEST + 1))
    command = shlex.split(hooks["large-files"]["entry"])
    assert subprocess.run([*command, small], check=False).returncode == 0
    refused = subprocess.run([*command, small, large], capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and refused.stdout.split() == [str(large)]


def test_no_file_of_the_repository_is_large(root):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this copy is no git repository")
    paths = [root / name for name in listed.stdout.split("\0") if name]
    assert [path.name for path in paths if path.is_file() and path.stat().st_size > LARGEST] == []


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_forms_for_issues_have_what_github_requires(root, name):
    form = yaml.safe_load((root / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8"))
    assert set(form) == {"name", "description", "labels", "body"}
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert asked and len({field["id"] for field in asked}) == len(asked)
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]


def test_the_citation_is_one(root):
    """The fields that schema 1.2.0 of the Citation File Format requires, and none that it does not have."""
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert set(citation) <= {
        *("abstract", "authors", "cff-version", "date-released", "doi", "keywords", "license", "message"),
        *("repository-code", "title", "type", "url", "version"),
    }
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] == project["name"] and citation["license"] == project["license"]
    assert citation["version"] == rlvr.__version__ and citation["keywords"] == project["keywords"]
    assert citation["authors"] and all(set(author) == {"name"} for author in citation["authors"])
