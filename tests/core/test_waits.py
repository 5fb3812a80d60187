"""The answer to SIGUSR1, which does not wait for the main thread."""

import ctypes
import os
import signal
import threading
import time

import pytest

from rlvr.core.waits import reporting


@pytest.mark.parametrize("taken", [False, True], ids=["free", "beside an event loop"])
def test_the_status_is_written_while_the_main_thread_is_inside_a_call_that_no_signal_ends(capfd, taken):
    """As a collective or a kernel is. An event loop in the main thread keeps its own wakeup descriptor."""
    output, answered = [], threading.Event()

    def describe():
        output.append(threading.current_thread() is threading.main_thread())
        answered.set()
        return "step 7"

    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)  # of zeros: pthread's initial value
    libc.pthread_mutex_lock(mutex)

    def ask():
        os.kill(os.getpid(), signal.SIGUSR1)
        answered.wait(0.5 if taken else 30)
        libc.pthread_mutex_unlock(mutex)

    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before = signal.getsignal(signal.SIGUSR1)
    if taken:
        signal.set_wakeup_fd(theirs)
    try:
        with reporting(describe):
            asking = threading.Thread(target=ask)
            asking.start()
            libc.pthread_mutex_lock(mutex)  # until `ask` gives it back
            inside = list(output)
            asking.join()
        assert signal.set_wakeup_fd(-1) == (theirs if taken else -1)
    finally:
        signal.set_wakeup_fd(-1)
        os.close(ours)
        os.close(theirs)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert output == ([True] if taken else [False])
    assert taken or inside == [False]
    assert capfd.readouterr().err == "step 7\n"


def test_the_innermost_description_is_the_answer(capfd):
    with reporting(lambda: "starting"):
        os.kill(os.getpid(), signal.SIGUSR1)
        _until_said(capfd, "starting\n")
        with reporting(lambda: "step 7"):
            os.kill(os.getpid(), signal.SIGUSR1)
            _until_said(capfd, "step 7\n")
        os.kill(os.getpid(), signal.SIGUSR1)
        _until_said(capfd, "starting\n")


def _until_said(capfd, text):
    """Wait until `text` was the last that was written to standard error."""
    output, end = "", time.monotonic() + 30
    while not output.endswith(text):
        assert time.monotonic() < end, output
        output += capfd.readouterr().err
        time.sleep(0.01)
