"""A run in a real notebook kernel: its progress is one output of the cell, and an error of the user is short."""

from __future__ import annotations

import sys

import pytest

from rlvr.monitor.notebook_cell import ROWS, NotebookCell, in_notebook

TRAINING = """
import json, logging
from rlvr import GRPOTrainer
tree = json.loads('''TREE''')
def nine(completion):
    if len(tree["run"]) > 99:
        return None
    return float("9" in completion)
rows = [{"prompt": f"{n}<b>", "answer": str(n)} for n in range(4)]
trainer = GRPOTrainer(None, rows, nine, tree, eval_tasks=rows)
"""


@pytest.fixture
def outputs_of(tmp_path, monkeypatch):
    """A function that runs cells in a kernel of this interpreter: the outputs of each."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter" / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*cells):
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
        client = NotebookClient(
            made, km=manager, timeout=900, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
        )
        client.owns_km = True
        return [cell.outputs for cell in client.execute().cells]

    return run


@pytest.mark.gate
@pytest.mark.timeout(1000)
def test_progress_lives_in_one_output_and_errors_are_short(outputs_of, tmp_path):
    import json

    from small_run import TREE, overlaid

    tree = overlaid(TREE, {"run": {"dir": str(tmp_path / "runs"), "steps": 30}, "logging": {"console": "auto"}})
    tree["model"]["scratch"]["alphabet"] += "<b>"
    setup, first, second, wrong = outputs_of(
        TRAINING.replace("TREE", json.dumps(tree)),
        "_ = trainer.train(20)",
        "logging.getLogger('rlvr.x').warning('look <i>here</i>')\n_ = trainer.train()",
        "GRPOTrainer(None, rows, nine, {**tree, 'learning_rate': 1})",
    )
    assert not [output for output in (*setup, *first, *second) if output.output_type == "error"]
    (shown,) = [output for output in first if output.output_type == "display_data"]
    assert not [output for output in first if output.output_type == "stream" and "reward" in output.text]
    text = shown.data["text/plain"]
    assert "grpo 20/30" in text and "evaluation at step 0" in text
    page = shown.data["text/html"]
    assert '<progress value="20" max="30"' in page
    rows = [line for line in text.splitlines() if line.split()[:1] and line.split()[0] in map(str, range(1, 21))]
    assert [line.split()[0] for line in rows] == [str(step) for step in range(21 - ROWS, 21)]
    # The samples of step 10 have prompts such as `3<b>`.
    assert "&lt;b&gt;" in page and "<b>" not in page
    # Another cell has an output of its own: progress, and the closing lines after it.
    later = [output.data["text/plain"] for output in second if output.output_type == "display_data"]
    assert "look <i>here</i>" in later[0]
    assert "grpo 30/30" in later[0]
    assert "done: 30 steps" in later[-1]
    assert len(later) == 2
    (error,) = [output for output in wrong if output.output_type == "error"]
    assert error.ename == "ConfigError"
    assert "learning_rate: unknown key, a name of TRL; here it is optim.lr" in error.evalue
    lines = "\n".join(error.traceback).splitlines()
    assert len(lines) < 20
    assert not any("config_loading.py" in line or "trainer_arguments.py" in line for line in lines)


def test_outside_of_a_kernel_there_is_no_cell():
    assert not in_notebook()


def test_contents_are_text():
    cell = NotebookCell()
    cell._lines.append("<script>")
    cell._place = "grpo 1/2 <b>"
    cell._rows.append("1 <i>")
    cell._total = 2
    page = cell._contents()["text/html"]
    assert "<script>" not in page and "<i>" not in page and "<b>" not in page
