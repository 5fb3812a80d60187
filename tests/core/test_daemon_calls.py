"""Calls on threads that are left behind: results, errors, and the end of a program beside a call that hangs."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from process_helpers import until
from rlvr.core.daemon_calls import DaemonThreads, awaited_in_daemon, in_daemon


def fails():
    raise KeyError("no such name")


def test_a_result_and_an_error_reach_the_caller_from_a_thread_of_that_name():
    assert in_daemon(lambda: threading.current_thread().name, "of-test").result(30) == "of-test"
    with pytest.raises(KeyError, match="no such name"):
        in_daemon(fails, "of-test").result(30)

    async def both():
        assert await awaited_in_daemon(lambda: 4, "of-test") == 4
        with pytest.raises(KeyError):
            await awaited_in_daemon(fails, "of-test")

    asyncio.run(both())


def test_a_call_that_was_given_up_ends_without_a_word(capfd):
    ended = threading.Event()

    async def given_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaited_in_daemon(lambda: ended.wait(30), "given-up"), 0.05)

    asyncio.run(given_up())
    ended.set()
    until = time.monotonic() + 30
    while any(thread.name == "given-up" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert capfd.readouterr().err == ""


HANGS = """
import asyncio, time
from rlvr.core.daemon_calls import DaemonThreads, awaited_in_daemon, in_daemon
in_daemon(lambda: time.sleep(600), "hangs")

async def beside():
    task = asyncio.ensure_future(awaited_in_daemon(lambda: time.sleep(600), "hangs too"))
    await asyncio.sleep(0.05)
    task.cancel()

asyncio.run(beside())
"""


def test_a_call_that_hangs_does_not_keep_the_program_from_ending():
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=120, check=False).returncode == 0


def test_at_most_so_many_calls_are_under_way_whoever_gives_them_up():
    threads = DaemonThreads(2, "of-test-pool")
    go_on = threading.Event()
    started = []

    def call(number):
        started.append(number)
        go_on.wait(30)
        return number

    futures = [threads.submit(lambda n=n: call(n)) for n in range(6)]
    until(lambda: len(started) == 2, 30, "two calls to begin")
    assert [future.cancel() for future in futures] == [False, False, True, True, True, True]
    more = threads.submit(lambda: call(6))
    time.sleep(0.05)
    assert sorted(started) == [0, 1]
    assert len([t for t in threading.enumerate() if t.name == "of-test-pool"]) == 2
    go_on.set()
    assert [future.result(30) for future in (*futures[:2], more)] == [0, 1, 6]
    threads.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "of-test-pool"], 30, "the threads to end")


def test_an_error_of_a_call_leaves_its_thread_to_the_next():
    threads = DaemonThreads(1, "of-test-one")
    with pytest.raises(KeyError):
        threads.submit(fails).result(30)
    assert threads.submit(lambda: 5).result(30) == 5
    threads.close()
