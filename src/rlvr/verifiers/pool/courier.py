"""Runs coroutines on another thread's loop, with one wake-up for all that one turn of the caller's loop starts.

Sixty rollouts that end in the same decoding step are verified at once: waking the other thread for each, and being
woken for each verdict, costs more than a quick verifier does. Invariant: a call ends as its coroutine ended, or was
cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    coroutine: Coroutine[Any, Any, Any]
    loop: asyncio.AbstractEventLoop
    """The caller's loop."""
    future: asyncio.Future[Any]
    task: asyncio.Task[Any] | None = None
    given_up: bool = False


class Courier:
    """Runs coroutines on `loop`, for any number of callers' loops."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._unsent: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        """Calls that are not sent yet, by the caller's loop; only that loop's thread touches its entry."""
        self._done: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        """Calls that ended in this turn of `loop`, by the caller's loop."""

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of `coroutine`; RuntimeError when the loop has ended, CancelledError when it cancels what it
        runs."""
        loop = asyncio.get_running_loop()
        call = _Call(coroutine, loop, loop.create_future())
        calls = self._unsent.setdefault(loop, [])
        calls.append(call)
        if len(calls) == 1:
            loop.call_soon(self._send, loop)
        try:
            result: T = await call.future
            return result
        except asyncio.CancelledError:
            # Two cases: the coroutine has not begun (`_start` then closes it), or it runs as a task of the other loop,
            # which alone may cancel it.
            call.given_up = True
            _tell(self.loop, lambda: call.task and call.task.cancel())
            raise

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._unsent.pop(loop)
        if not _tell(self.loop, lambda: self._start(calls)):
            for call in calls:
                # A coroutine that is dropped without this warns that it was never awaited.
                call.coroutine.close()
                if not call.future.done():
                    call.future.set_exception(RuntimeError("the loop has ended"))

    def _start(self, calls: list[_Call]) -> None:
        for call in calls:
            if call.given_up:
                call.coroutine.close()
                continue
            call.task = self.loop.create_task(call.coroutine)
            call.task.add_done_callback(lambda _, call=call: self._ended(call))  # type: ignore[misc]

    def _ended(self, call: _Call) -> None:
        if call.task is not None and call.task.cancelled():
            _tell(call.loop, lambda: _settle([call]))  # at once: this loop may be about to end
            return
        calls = self._done.setdefault(call.loop, [])
        calls.append(call)
        if len(calls) == 1:
            self.loop.call_soon(self._give_back, call.loop)

    def _give_back(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._done.pop(loop)
        _tell(loop, lambda: _settle(calls))


def _settle(calls: list[_Call]) -> None:
    for call in calls:
        task = call.task
        future = call.future
        # The caller may have been cancelled in the meantime.
        if task is None or future.done():
            continue
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> bool:
    """Have a loop of another thread call `what`; False when it has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)
        return True
    return False
