"""Calls on daemon threads, which the end of the program does not wait for.

An executor of concurrent.futures, and with it `asyncio.to_thread`, is not for calls that may hang: at its end the
interpreter joins the threads of all executors (`threading._register_atexit` in Lib/concurrent/futures/thread.py of
CPython 3.11).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

T = TypeVar("T")


def in_daemon(function: Callable[[], T], name: str) -> Future[T]:
    """The result of `function()`, computed on a new daemon thread called `name`, as a future for any thread."""
    future: Future[T] = Future()

    def work() -> None:
        # Whoever gave it up has cancelled the future.
        with contextlib.suppress(InvalidStateError):
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


async def awaited_in_daemon(function: Callable[[], T], name: str) -> T:
    """The same for an event loop, as `asyncio.to_thread`; a caller that is cancelled leaves the call behind."""
    return await asyncio.wrap_future(in_daemon(function, name))
