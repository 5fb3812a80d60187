"""What processes that were started for a run leave behind when they are killed: nothing in /dev/shm."""

import os
import signal
from pathlib import Path

import pytest
from vllm_helpers import alive, group_of, until

from rlvr import lifeline

HOLDS_SEMAPHORES = """
import multiprocessing, sys, time
from pathlib import Path

def below(lock, name):
    from rlvr import lifeline
    lifeline.tie()  # as vLLM's workers
    Path(name).touch()
    time.sleep(600)

if __name__ == "__main__":
    spawned = multiprocessing.get_context("spawn")
    lock = spawned.Lock()
    spawned.Process(target=below, args=(lock, sys.argv[2])).start()
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    Path(sys.argv[1]).write_text(lock._semlock.name)
    time.sleep(600)
"""


@pytest.mark.parametrize("who", ["the group", "the leader"])
def test_a_killed_process_leaves_no_semaphore(tmp_path, who):
    (tmp_path / "holds_semaphores.py").write_text(HOLDS_SEMAPHORES)
    name = tmp_path / "name"
    scratch = tmp_path / f"{lifeline.PREFIX}scratch"
    scratch.mkdir()
    process = lifeline.start(
        "holds_semaphores",
        [str(name), str(tmp_path / "below")],
        {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])},
        scratch,
        tmp_path / "log",
    )
    try:
        until(lambda: name.exists() and name.read_text(), 120, "the process to start")
        semaphore = Path(f"/dev/shm/sem.{name.read_text().lstrip('/')}")
        group = group_of(process.pid)
        assert semaphore.exists() and len(group) == 3  # with multiprocessing's resource tracker
        if who == "the group":
            lifeline.kill(process)
        else:
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, group)), 60, "the group to be gone")
        assert not semaphore.exists()
    finally:
        lifeline.kill(process)
