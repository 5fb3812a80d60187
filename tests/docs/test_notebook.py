"""Each notebook runs from its first cell to its last, and shows what its text says."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from test_links import OF_A_MACHINE

NOTEBOOKS = ("first_run", "reading_a_run")


@pytest.fixture
def notebook(root):
    """A function that reads a notebook by its name."""
    import nbformat  # here and below: these take four seconds, which a test run without notebooks saves

    return lambda name: nbformat.read(root / f"docs/notebooks/{name}.ipynb", as_version=4)


@pytest.fixture
def run_through(notebook, tmp_path, monkeypatch):
    """A function that runs a notebook in an empty folder: that folder, and the outputs of each cell by its id."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    # The kernel of this interpreter, whatever kernels the machine knows, and nothing written outside the test's folder.
    specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter" / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    work = tmp_path / "work"
    work.mkdir()

    def run(name: str):
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
        client = NotebookClient(notebook(name), km=manager, timeout=240, resources={"metadata": {"path": str(work)}})
        client.owns_km = True  # it ends the kernel, which a given manager would keep
        outputs = {cell.id: cell.outputs for cell in client.execute().cells if cell.cell_type == "code"}
        assert not [output for shown in outputs.values() for output in shown if output.output_type == "error"]
        return work, outputs

    return run


def test_every_notebook_is_run_here(root):
    assert {path.stem for path in (root / "docs").rglob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_with_its_outputs(root, notebook, name):
    """As scripts/run_notebooks.py writes it: run once from top to bottom, without what differs between machines."""
    import nbformat

    written = notebook(name)
    nbformat.validate(written)
    code = [cell for cell in written.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(cell.metadata for cell in written.cells)
    assert set(written.metadata) == {"kernelspec", "language_info"}
    kinds = [cell.cell_type for cell in written.cells[1:]]  # after the title, text and code take turns
    assert kinds == ["markdown", "code"] * (len(kinds) // 2)
    outputs = [output for cell in code for output in cell.outputs]
    assert len(outputs) > 5
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    file = root / f"docs/notebooks/{name}.ipynb"
    assert file.stat().st_size < 1_000_000
    assert not OF_A_MACHINE.findall(text(outputs))


@pytest.mark.gate
@pytest.mark.timeout(300)
def test_the_first_run_is_interrupted_goes_on_and_learns(run_through):
    work, outputs = run_through("first_run")
    run = work / "runs" / "even-digits"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))

    stopped, end = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    assert 20 <= stopped < end == 60
    assert f"stopped after {stopped} of 60 steps by SIGINT" in text(outputs["interrupted"])

    reward = np.asarray([row["reward/mean"] for row in rows])
    assert reward[-5:].mean() > reward[:5].mean() + 0.3
    assert text(outputs["rollouts"]).count("score") == 8
    assert any("image/png" in output.get("data", {}) for output in outputs["plot"])
    findings = run / "health.jsonl"
    assert not findings.is_file() or not findings.read_text()
    assert ", truncated:" not in text(outputs["train"]) + text(outputs["again"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reading_a_run_finds_the_fault_of_its_reward(run_through):
    work, outputs = run_through("reading_a_run")
    rewards = [float(result) for result in re.findall(r"reward/mean ([\d.]+)", text(outputs["metrics"]))]
    scores = [float(result) for result in re.findall(r"eval/greedy ([\d.]+)", text(outputs["evaluations"]))]
    assert rewards[-1] > rewards[0] + 0.5
    assert scores[0] < 0.5 < max(scores) and scores[-1] < max(scores) - 0.3
    assert "reward_hacking: the reward rose" in text(outputs["health"])
    assert text(outputs["rollouts"]).count("777") >= 5
    page = work / "runs/sevens/report.html"
    assert page.is_file() and "report.html" in text(outputs["report"])


def text(outputs) -> str:
    """What the cells printed."""
    return "".join(output.get("text", output.get("data", {}).get("text/plain", "")) for output in outputs)
