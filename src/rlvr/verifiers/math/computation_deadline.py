"""A time limit on Python code that knows none, on any thread and without signals.

A watcher thread raises `OutOfTime` in the thread that computes. It ends Python code only: one long operation in C (a
power with millions of digits) is not interrupted, so whoever calls this keeps such operations away.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Short against the time limit, long against the few instructions that `finally` needs.
_AGAIN = 0.05
"""Seconds until the exception is raised once more, where the code has swallowed it."""


class OutOfTime(BaseException):
    """The time is up. Not an Exception, so that code that expects any Exception lets it through."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of `call`; raises OutOfTime after `seconds`."""
    here = threading.get_ident()
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            # CPython raises it where the thread next runs Python code; a call in C has to return first.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(here), ctypes.py_object(OutOfTime))
            wait = _AGAIN

    watcher = threading.Thread(target=watch, daemon=True, name="verifier-deadline")
    watcher.start()
    try:
        return call()
    finally:
        # What is raised too late is let through and swallowed here, never taken back with SetAsyncExc(None): on CPython
        # 3.11 that leaves "something is pending" set, and the thread spins for ever in its next traced call (a
        # debugger).
        try:
            done.set()
            watcher.join()
            _any_call()
        except OutOfTime:  # the next is at least _AGAIN away
            done.set()
            watcher.join()


def _any_call() -> None:
    """A pending exception is raised when a Python function is entered."""
