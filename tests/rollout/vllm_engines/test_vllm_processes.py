"""No process and no file of an engine outlives the trainer, however it ends; both engines inside a running event
loop."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from vllm_helpers import needs_vllm

from process_helpers import alive, group_of, until
from rlvr.core.process import parent_death

pytestmark = [needs_vllm, pytest.mark.alone]
START = 300  # seconds that an engine and a server may take to start on a busy machine
HERE = Path(__file__).parents[1]

TRAINER = """
import signal, sys, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {here!r})
if __name__ == "__main__":
    from vllm_helpers import FAST, tiny
    from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions
    policy = tiny()
    with ThreadPoolExecutor() as both:
        engine, server = both.map(lambda options: options(**FAST).open(policy), (VLLMOptions, VLLMServerOptions))
    print(engine._host.process.pid, server._members.all[0].started.process.pid, flush=True)
    {then}
"""


def started(tmp_path, then):
    """A trainer with an engine and a server, their process groups, and its scratch folders."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.format(here=str(HERE), then=then))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    leaders = [int(word) for word in process.stdout.readline().split()]
    assert len(leaders) == 2, "the engines did not start"
    return process, leaders


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "then"),
    [
        (signal.SIGKILL, "time.sleep(600)"),
        pytest.param(signal.SIGTERM, "time.sleep(600)", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "time.sleep(600)", marks=pytest.mark.slow),
        pytest.param(None, "raise RuntimeError('nobody closes')", marks=pytest.mark.slow),
    ],
    ids=["SIGKILL", "SIGTERM", "Ctrl-C", "exception"],
)
def test_nothing_outlives_the_trainer(tmp_path, number, then):
    process, leaders = started(tmp_path, then)
    processes = [pid for leader in leaders for pid in group_of(leader)]
    if number is not None:
        assert len(processes) >= 3  # the engine, the server and its engine core
        assert len(list(tmp_path.glob(f"{parent_death.PREFIX}*"))) == 2
        os.kill(process.pid, number)
    process.wait(60)
    until(lambda: not any(group_of(leader) for leader in leaders), 20, "the engines' processes to end")
    assert not any(map(alive, processes))
    until(lambda: not list(tmp_path.glob(f"{parent_death.PREFIX}*")), 20, "the scratch folders to go")


@pytest.mark.slow  # the cells of a notebook, below, have a running loop too
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["vllm", "vllm-server"])
def test_a_trainer_inside_a_running_event_loop(tmp_path, name):
    """As in a notebook; in a process of its own, because a test's loop is not one that is already running."""
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(HERE)!r})
            from rlvr import GRPOTrainer
            from vllm_helpers import FAST, TINY

            async def cell():
                config = {{
                    "run": {{"dir": {str(tmp_path)!r}, "steps": 3}},
                    "model": {{"scratch": {{**TINY, "context": 96, "init_std": 0.2}}, "device": "cpu"}},
                    "rollout": {{"engine": {{"name": {name!r}, **FAST}}, "prompts_per_step": 2, "group_size": 4,
                                "max_new_tokens": 8}},
                    "optim": {{"lr": 0.01}},
                    "logging": {{"console": "off"}},
                }}
                digits = lambda completion: sum(c.isdigit() for c in completion) / 8
                with GRPOTrainer(None, ["a b", "c d"], digits, config) as trainer:
                    return trainer.train()

            if __name__ == "__main__":
                rows = asyncio.run(cell())
                assert len(rows) == 3
                assert all(row["mismatch/max"] is None or row["mismatch/max"] < 1e-4 for row in rows), rows
                assert all(row["publish/bytes"] > 10**5 and row["publish/seconds"] > 0 for row in rows), rows
                assert any(row["mismatch/max"] is not None for row in rows)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=START, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


CELL = """
import sys
sys.path.insert(0, {here!r})
from rlvr import GRPOTrainer
from vllm_helpers import FAST, TINY

config = {{
    "run": {{"dir": {folder!r}, "name": {name!r}, "steps": 3}},
    "model": {{"scratch": {{**TINY, "context": 96, "init_std": 0.2}}, "device": "cpu"}},
    "rollout": {{
        "engine": {{"name": {name!r}, **FAST}}, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8,
        "staleness": 1
    }},
    "optim": {{"lr": 0.01}},
    "logging": {{"console": "off"}},
}}
trainer = GRPOTrainer(None, ["a b", "c d"], lambda completion: sum(c.isdigit() for c in completion) / 8, config)
print(len(trainer.train(2)))
"""
"""A cell that trains two steps of three and leaves the trainer open: the next one goes on."""
GO_ON = """
rows = trainer.train()
trainer.close()
assert len(rows) == 3
assert max(row["policy/staleness_max"] for row in rows) == 1
print(sorted(row["mismatch/max"] is not None for row in rows)[-1])
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", ["vllm", "vllm-server"])
def test_cells_of_a_notebook(tmp_path, monkeypatch, name):
    """In a real kernel, whose event loop runs; sampling goes on between the cells. The kernel's end ends the engine."""
    from jupyter_client.kernelspec import KernelSpecManager  # here: these imports take four seconds
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter" / variable))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    specs = KernelSpecManager(kernel_dirs=[], ensure_native_kernel=True)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    in_the_loop = "import asyncio\nassert asyncio.get_running_loop().is_running()\n"
    cell = CELL.format(here=str(HERE), folder=str(tmp_path / "runs"), name=name)
    notebook = new_notebook(cells=[new_code_cell(in_the_loop + cell), new_code_cell(GO_ON)])
    client = NotebookClient(notebook, km=manager, timeout=START, resources={"metadata": {"path": str(tmp_path)}})
    client.owns_km = True  # it ends the kernel, which a given manager would keep
    done = client.execute()
    assert [cell.outputs[-1]["text"] for cell in done.cells] == ["2\n", "True\n"]


def test_scratch_folders_are_removed_and_nothing_else(tmp_path):
    """A process whose owner is gone removes the owner's scratch folder, only when it is one by its name."""
    for name, goes in ((f"{parent_death.PREFIX}abc", True), ("my-data", False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "file").write_text("x")
        code = "from rlvr.core.process import parent_death; parent_death.die_with_parent(); import time; time.sleep(30)"
        gone = subprocess.Popen([sys.executable, "-c", "pass"])
        gone.wait()
        environment = {**os.environ, parent_death.OWNER: str(gone.pid), parent_death.SCRATCH: str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, start_new_session=True, timeout=60, check=False
        )
        assert done.returncode != 0
        assert folder.exists() is not goes
