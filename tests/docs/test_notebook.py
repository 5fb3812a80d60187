"""The notebook runs from its first cell to its last: it is interrupted, goes on, and its reward rises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOK = Path("docs/notebooks/first_run.ipynb")


@pytest.fixture
def notebook(root):
    return nbformat.read(root / NOTEBOOK, as_version=4)


def test_the_notebook_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert not any(cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    kinds = [cell.cell_type for cell in notebook.cells[1:]]  # after the title, text and code take turns
    assert kinds == ["markdown", "code"] * (len(kinds) // 2)


@pytest.mark.timeout(300)
def test_the_notebook_is_interrupted_goes_on_and_learns(notebook, tmp_path, monkeypatch):
    # The kernel of this interpreter, whatever kernels the machine knows, and nothing written outside the test's folder.
    specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter" / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    work = tmp_path / "work"
    work.mkdir()
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)

    done = NotebookClient(notebook, km=manager, timeout=240, resources={"metadata": {"path": str(work)}}).execute()

    outputs = {cell.id: cell.outputs for cell in done.cells if cell.cell_type == "code"}
    assert not [output for shown in outputs.values() for output in shown if output.output_type == "error"]
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


def text(outputs) -> str:
    return "".join(output.get("text", "") for output in outputs)
