"""Stacks of real processes that hang and crash, through a pipe; exceptions that go to another process."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_helpers import alive, until
from rlvr.core.process import tracing
from rlvr.core.process.tracing import RemoteFailure, StackPipe

HANGS = """
import sys, threading, time
from rlvr.core.process.tracing import write_stacks
write_stacks(int(sys.argv[1]))

def waits_for_ever():
    time.sleep(600)

def computes_for_ever():
    print("ready", flush=True)
    while True:
        pass

threading.Thread(target=waits_for_ever, daemon=True).start()
computes_for_ever()
"""
CRASHES = """
import os, signal, sys
from rlvr.core.process.tracing import write_stacks
write_stacks(int(sys.argv[1]))

def breaks():
    os.kill(os.getpid(), signal.SIGSEGV)

breaks()
"""
FILLS_THE_PIPE = """
import os, signal, sys
for _ in range(3000):
    try:
        os.write(int(sys.argv[1]), b"x" * 1000)
    except BlockingIOError:
        pass
"""


@pytest.fixture
def pipe():
    made = StackPipe()
    yield made
    made.close()


def started(program, pipe):
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(pipe.writer)], pass_fds=[pipe.writer], stdout=subprocess.PIPE
    )
    os.close(pipe.writer)
    return process


def ended(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_that_hangs_writes_the_stacks_of_all_threads_and_goes_on(pipe):
    process = started(HANGS, pipe)
    try:
        assert process.stdout.readline() == b"ready\n"
        assert pipe.text() == ""
        assert tracing.request_stacks([process.pid])
        text = asyncio.run(pipe.written())
        assert "in waits_for_ever" in text and "in computes_for_ever" in text
        assert process.poll() is None
    finally:
        ended(process)


def test_a_stopped_process_is_not_waited_for(pipe):
    process = started(HANGS, pipe)
    try:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        assert tracing.request_stacks([process.pid])
        begun = time.monotonic()
        assert asyncio.run(pipe.written()) == ""
        assert time.monotonic() - begun < 20
    finally:
        ended(process)


def test_a_process_that_cannot_write_its_stacks_is_not_asked():
    """The signal would end it."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        command = Path(f"/proc/{process.pid}/cmdline")
        until(lambda: command.read_bytes().startswith(b"sleep"), 20, "the program to start")
        assert not tracing.request_stacks([process.pid])
        time.sleep(0.2)
        assert alive(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not tracing.request_stacks([process.pid])


def test_a_crash_leaves_its_stack_and_its_signal(pipe):
    process = started(CRASHES, pipe)
    assert process.wait(60) == -signal.SIGSEGV
    process.stdout.close()
    pipe.close()
    assert "Segmentation fault" in pipe.text() and "in breaks" in pipe.text()


def test_a_process_that_writes_too_much_is_neither_held_up_nor_believed(pipe):
    process = started(FILLS_THE_PIPE, pipe)
    assert process.wait(60) == 0
    process.stdout.close()
    assert 0 < len(pipe.text()) <= tracing.MOST


def test_a_closed_pipe_gives_its_descriptors_back():
    before = len(os.listdir("/proc/self/fd"))
    pipe = StackPipe()
    os.write(pipe.writer, b"last words")
    os.close(pipe.writer)
    pipe.close()
    pipe.close()
    assert (pipe.text(), len(os.listdir("/proc/self/fd"))) == ("last words", before)


def test_an_exception_of_another_process_is_told_with_its_traceback():
    def innermost():
        raise LocalError("the cause")

    class LocalError(Exception):
        """Cannot be pickled."""

    try:
        innermost()
    except LocalError as error:
        failure = RemoteFailure.of(error)
    text = pickle.loads(pickle.dumps(failure)).told("the other process")
    assert text.startswith("LocalError: the cause; in the other process:\nTraceback (most recent call last):")
    assert "in innermost" in text and text.endswith("LocalError: the cause")


def test_a_pipe_is_inherited_only_by_whom_it_is_passed_to(pipe):
    assert not os.get_inheritable(pipe.writer) and not os.get_inheritable(pipe._read)


def test_the_end_of_a_long_traceback_is_kept():
    try:
        raise ValueError("x" * tracing.MOST + " the last words")
    except ValueError as error:
        failure = RemoteFailure.of(error)
    assert len(failure.traceback) == tracing.MOST and failure.traceback.endswith("the last words")
