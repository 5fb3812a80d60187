"""Requests by number to another process: awaited on any event loop or waited for by a thread, answered by the thread
that reads the connection.

Invariant: when the connection ends, everything that waits learns so at once, and so does what is asked later.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Replies(Generic[T]):
    """The replies that are waited for."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # With its loop a future of asyncio, with None one that a thread waits for.
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop | None, asyncio.Future[T] | Future[T]]] = {}
        self._failure: tuple[Callable[[str], Exception], str] | None = None
        self._lock = threading.Lock()
        """Held for `_waiting` and `_failure`, which the reading thread touches too."""

    @property
    def waiting(self) -> bool:
        """Return True if a request waits for its reply."""
        return bool(self._waiting)

    async def ask(self, send: Callable[[int], None], give_up: Callable[[int], None]) -> T:
        """The reply to the request that `send(number)` sends. `give_up(number)` is called when the caller is
        cancelled."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        number = self._register(loop, future)
        try:
            send(number)
            return await future
        except asyncio.CancelledError:
            give_up(number)
            raise
        finally:
            self._forget(number)

    def submit(self, send: Callable[[int], None]) -> Future[T]:
        """The reply to the request that `send(number)` sends, for a thread. A caller that waits no longer cancels it;
        the reply is dropped then."""
        future: Future[T] = Future()
        number = self._register(None, future)
        future.add_done_callback(lambda _: self._forget(number))
        try:
            send(number)
        except BaseException:
            future.cancel()
            raise
        return future

    def _register(self, loop: asyncio.AbstractEventLoop | None, future: asyncio.Future[T] | Future[T]) -> int:
        """The number of a request that is about to be sent: the reply may come on the reading thread at once."""
        number = next(self._numbers)
        with self._lock:
            # Under the lock: `fail` sets it and then fails all that wait, so a request registered after that would wait
            # for ever.
            if self._failure is not None:
                kind, text = self._failure
                raise kind(text)
            self._waiting[number] = loop, future
        return number

    def _forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)

    def settle(self, replies: Iterable[tuple[int, T | Exception]]) -> None:
        """Hand replies, or the errors in their place, to those who wait for them. From any thread."""
        # One wake-up of a loop for all of them, not one for each: waking a loop is a system call and a turn of it.
        by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[asyncio.Future[T] | Future[T], T | Exception]]] = {}
        with self._lock:
            for number, reply in replies:
                if (request := self._waiting.get(number)) is not None:
                    by_loop.setdefault(request[0], []).append((request[1], reply))
        # Outside the lock, which the callback of a settled future takes.
        _settle(by_loop.pop(None, []))
        for loop, settled in by_loop.items():
            assert loop is not None
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(_settle, settled)

    def fail(self, kind: Callable[[str], Exception], text: str) -> None:
        """Raise `kind(text)` for all that wait, and for whatever is asked from now on. From any thread."""
        # A text and not an error: one instance, raised for several, would collect the tracebacks of all.
        with self._lock:
            self._failure = kind, text
            numbers = list(self._waiting)
        self.settle([(number, kind(text)) for number in numbers])


def _settle(settled: list[tuple[asyncio.Future[Any] | Future[Any], Any]]) -> None:
    for future, reply in settled:
        if future.done():  # given up, or settled, in the meantime
            continue
        # A thread may cancel its future at any moment.
        with contextlib.suppress(InvalidStateError):
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
