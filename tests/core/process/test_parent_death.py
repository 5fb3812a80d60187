"""What processes that were started for a run leave behind when they or the run are killed: nothing in /dev/shm, and no
folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from process_helpers import alive, group_of, until
from rlvr.core.process import child_process, parent_death

HOLDS_SEMAPHORES = """
import multiprocessing, sys, time
from pathlib import Path

def below(lock, name):
    from rlvr.core.process import parent_death
    parent_death.die_with_parent()  # as vLLM's workers
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
    scratch = tmp_path / f"{parent_death.PREFIX}scratch"
    scratch.mkdir()
    process = child_process.start(
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
            child_process.kill(process)
        else:
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: not any(map(alive, group)), 60, "the group to be gone")
        assert not semaphore.exists()
    finally:
        child_process.kill(process)


ENDS_WITH_ITS_CHILD = """
import subprocess, sys
from pathlib import Path

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1]).touch()
child.wait()  # as vLLM's server, which ends when its engine core does
"""
OWNER = """
import sys, time
from pathlib import Path
from rlvr.core.process import child_process
path, ready, scratch = sys.argv[1:]
child_process.start("ends_with_its_child", [ready], {"PYTHONPATH": path}, Path(scratch), Path(scratch) / "log")
time.sleep(600)
"""


def test_the_scratch_folder_goes_though_the_process_ends_by_itself_meanwhile(tmp_path):
    """The owner is killed. A process that is to remove the folder kills its child first, of which it ends in another
    thread."""
    (tmp_path / "ends_with_its_child.py").write_text(ENDS_WITH_ITS_CHILD)
    scratch = tmp_path / f"{parent_death.PREFIX}scratch"
    for number in range(100):
        (scratch / str(number)).mkdir(parents=True)
        for file in range(100):
            (scratch / str(number) / str(file)).touch()
    ready = tmp_path / "ready"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    owner = subprocess.Popen([sys.executable, "-c", OWNER, path, str(ready), str(scratch)])
    until(ready.exists, 120, "the process to start")
    owner.kill()
    owner.wait()
    until(lambda: not scratch.exists(), 60, "the scratch folder to go")


DIES_MEANWHILE = """
import os, signal, sys, time
from pathlib import Path
from rlvr.core.process import parent_death

# A parent that ends between the two looks at it: this process has another one then.
parents = iter([os.getppid(), 1])
os.getppid = lambda: next(parents, 1)
os.environ[parent_death.OWNER] = str(os.getpid())
if sys.argv[1] == "die_with_parent":
    parent_death.die_with_parent()
else:
    parent_death.signal_on_parent_death(next(parents), signal.SIGKILL)
print("goes on", flush=True)
"""


@pytest.mark.parametrize("how", ["die_with_parent", "signal_on_parent_death"])
def test_a_parent_that_ends_while_a_process_begins_to_watch_it_is_noticed(how):
    process = subprocess.run(
        [sys.executable, "-c", DIES_MEANWHILE, how],
        capture_output=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stdout) == (1, b"")
