"""Calls on daemon threads, which the end of the program does not wait for.

An executor of concurrent.futures, and with it `asyncio.to_thread`, is not for calls that may hang: at its end the
interpreter joins the threads of all executors (`threading._register_atexit` in Lib/concurrent/futures/thread.py of
CPython 3.11).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class DaemonThreads:
    """At most `most` calls at once, each on a daemon thread, in the order of `submit`; the others wait.

    A call whose future was cancelled before it began is left out. One that is under way keeps its thread to its end.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """The result of `function()` as a future for any thread."""
        future: Future[T] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._calls.put(lambda: _settle(future, function))
        return future

    def close(self) -> None:
        """End the threads after what was submitted."""
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            with self._lock:
                self._idle += 1


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """Give the future what `function()` returns or raises, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def in_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """The result of `function()`, computed on a new daemon thread called `name`, as a future for any thread."""
    future: Future[T] = Future()
    threading.Thread(target=_settle, args=(future, function), name=name, daemon=True).start()
    return future


async def awaited_in_daemon(function: Callable[[], T], name: str) -> T:
    """The same for an event loop, as `asyncio.to_thread`; a caller that is cancelled leaves the call behind."""
    return await asyncio.wrap_future(in_daemon(function, name))
