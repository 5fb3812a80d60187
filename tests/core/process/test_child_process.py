"""Processes started by exec: their environment, their end with the caller's wish or against theirs."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from process_helpers import alive, group_of, until
from rlvr.core.process import child_process
from rlvr.core.process.parent_death import members

READS_UNTIL_THE_END = "import sys; sys.stdin.read()"
SLEEPS = "import time; time.sleep(600)"
IGNORES_ALL = """
import signal, sys, time
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
STARTS_ANOTHER = """
import subprocess, time
subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
time.sleep(600)
"""


def python(text, tmp_path):
    with (tmp_path / "output").open("ab") as output:
        return child_process.spawn([sys.executable, "-c", text], dict(os.environ), output)


def stopped_by_signal(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_started_module_is_no_rank_and_has_what_it_is_given(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "kept")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (tmp_path / "prints_environment.py").write_text("import os, sys\nprint(sys.argv[1:], sorted(os.environ))\n")
    process = child_process.start(
        "prints_environment",
        ["--an", "argument"],
        {"PYTHONPATH": str(tmp_path), "OWN": "1"},
        tmp_path,
        tmp_path / "log",
    )
    assert process.wait(timeout=60) == 0
    printed = child_process.tail(tmp_path / "log")
    assert printed.startswith("['--an', 'argument']")
    assert all(f"'{name}'" in printed for name in ("OWN", "RANKING", "CUDA_VISIBLE_DEVICES"))
    assert not any(f"'{name}'" in printed for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))


def test_a_module_without_a_log_prints_where_its_parent_does(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    (tmp_path / "prints_twice.py").write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    assert child_process.start("prints_twice", [], {}).wait(timeout=60) == 0
    assert capfd.readouterr() == ("out\n", "err\n")


def test_a_module_that_fails_leaves_its_traceback_in_the_log(tmp_path):
    (tmp_path / "fails_at_once.py").write_text("raise RuntimeError('on purpose')\n")
    process = child_process.start("fails_at_once", [], {"PYTHONPATH": str(tmp_path)}, tmp_path, tmp_path / "log")
    assert process.wait(timeout=60) == 1
    assert child_process.tail(tmp_path / "log", 1) == "RuntimeError: on purpose"
    assert child_process.tail(tmp_path / "no such log") == ""


def test_the_end_of_a_long_log_is_read_and_not_the_whole(tmp_path):
    log = tmp_path / "log"
    log.write_text("old\n" * 10 + "x" * 3 * child_process.TAIL_BYTES + "\nlast but one\nlast\n")
    assert child_process.tail(log, 2) == "last but one\nlast"
    assert len(child_process.tail(log, 60)) <= child_process.TAIL_BYTES


MODULE_THAT_HANGS = """
import sys, time

def hangs_here():
    print("ready", flush=True)
    time.sleep(600)

hangs_here()
"""


def module(name, text, tmp_path):
    (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return child_process.start(name, [], {"PYTHONPATH": path}, tmp_path, tmp_path / "log")


def test_a_module_that_hangs_is_explained_by_its_stack_and_goes_on(tmp_path):
    process = module("hangs_in_a_function", MODULE_THAT_HANGS, tmp_path)
    try:
        until(lambda: "ready" in child_process.tail(tmp_path / "log"), 60, "the process to start")
        text = child_process.explain(process, tmp_path / "log")
        assert text.startswith("ready") and "in hangs_here" in text
        assert process.poll() is None
    finally:
        child_process.kill(process)
    assert child_process.explain(process, tmp_path / "log") == text  # it has ended: the log as it is


def test_a_module_that_crashes_leaves_its_stack_in_the_log(tmp_path):
    crashes = "import os\n\ndef breaks():\n    os.abort()\n\nbreaks()\n"
    process = module("aborts_in_a_function", crashes, tmp_path)
    assert process.wait(timeout=60) == -signal.SIGABRT
    text = child_process.explain(process, tmp_path / "log")
    assert "Fatal Python error: Aborted" in text and "in breaks" in text


def test_a_process_that_is_killed_for_its_deadline_leaves_its_stack(tmp_path):
    process = module("ends_by_no_socket", MODULE_THAT_HANGS, tmp_path)
    until(lambda: "ready" in child_process.tail(tmp_path / "log"), 60, "the process to start")
    asyncio.run(child_process.stop(process, seconds=0.2))
    assert process.returncode == -signal.SIGKILL
    assert "in hangs_here" in child_process.tail(tmp_path / "log", child_process.STACK_LINES)


def test_a_process_gets_a_group_of_its_own_and_reads_nothing_of_the_terminal(tmp_path):
    process = python(READS_UNTIL_THE_END, tmp_path)
    assert os.getpgid(process.pid) == process.pid != os.getpgrp() or process.poll() is not None
    assert process.wait(timeout=60) == 0  # standard input is empty


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_stop_kills_what_does_not_end_by_itself(tmp_path, stopped):
    process = python(IGNORES_ALL, tmp_path)
    until(lambda: "ready" in (tmp_path / "output").read_text(), 60, "the process to start")
    if stopped:
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: stopped_by_signal(process.pid), 60, "the process to stop")
    asyncio.run(child_process.stop(process, seconds=0.2))
    assert process.returncode == -signal.SIGKILL


def test_stop_lets_the_loop_go_on(tmp_path):
    process = python("import time; time.sleep(0.5)", tmp_path)
    turns = 0

    async def both():
        nonlocal turns
        stopping = asyncio.create_task(child_process.stop(process, seconds=60))
        while not stopping.done():
            await asyncio.sleep(0.01)
            turns += 1

    asyncio.run(both())
    assert process.returncode == 0 and turns > 5


def test_kill_ends_the_whole_group(tmp_path):
    text = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('ready', flush=True); time.sleep(600)"
    )
    process = python(text, tmp_path)
    until(lambda: "ready" in (tmp_path / "output").read_text(), 60, "the process to start")
    group = group_of(process.pid)
    assert len(group) == 2 and sorted(members(process.pid)) == sorted(group)
    child_process.kill(process)
    until(lambda: not any(map(alive, group)), 60, "the group to be gone")
    assert process.returncode == -signal.SIGKILL


def test_marked_processes_are_killed_in_whatever_session_and_no_other(tmp_path):
    program = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""
    marked = {**os.environ, "RLVR_TEST_MARK": "this one"}
    process = subprocess.Popen([sys.executable, "-c", program], env=marked, stdout=subprocess.PIPE)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "RLVR_TEST_MARK": "this one too"})
    assert process.stdout.readline() == b"ready\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    try:
        child_process.kill_marked("RLVR_TEST_MARK", "this one")
        assert process.wait(60) == -signal.SIGKILL
        until(lambda: not any(alive(int(child)) for child in children), 60, "the children to be gone")
        assert other.poll() is None
    finally:
        process.stdout.close()
        other.kill()
        other.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_kernel_signals_a_process_whose_parent_dies(tmp_path):
    # Three generations: we, a parent that is killed, its child that asked for the signal.
    child = """
import os, signal, sys, time
from rlvr.core.process.parent_death import signal_on_parent_death
signal_on_parent_death(int(sys.argv[1]), signal.SIGKILL)
print(os.getpid(), flush=True)
time.sleep(600)
"""
    parent = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())], start_new_session=True)
time.sleep(600)
"""
    process = python(parent, tmp_path)
    until(lambda: (tmp_path / "output").read_text().endswith("\n"), 60, "the grandchild to start")
    grandchild = int((tmp_path / "output").read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    until(lambda: not alive(grandchild), 60, "the grandchild to end")


def test_a_number_that_is_another_process_s_now_is_not_killed(tmp_path):
    """A process that ended and was waited for; its number belongs to a process of somebody else."""
    ended = python("pass", tmp_path)
    ended.wait()
    other = python(SLEEPS, tmp_path)
    try:
        ended.pid = other.pid
        child_process.kill(ended)
        assert other.poll() is None
    finally:
        child_process.kill(other)
    assert other.returncode == -signal.SIGKILL
