"""A gate before an engine: while it is shut, new requests wait and open ones finish; the check of the order of
publishes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator

from rlvr.core.waits import Wait
from rlvr.errors import TrainingError


class RequestGate:
    """`inside()` round each request, on any event loop; `emptied()` round what needs the engine to itself, on any
    thread."""

    def __init__(self) -> None:
        # A threading condition: requests come from event loops, a publish from the trainer's thread. It is never held
        # across an `await`.
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False
        self._held: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Waits while the gate is shut."""
        # Tried again after each opening: another publish may have shut the gate before this coroutine runs.
        while not self._let_in():
            loop = asyncio.get_running_loop()
            turn: asyncio.Future[None] = loop.create_future()
            with self._changed:
                self._held.append((loop, turn))
                # Opened between `_let_in` and here: `emptied` has already released its list, so nothing else would wake
                # this one.
                if not self._shut:
                    turn.set_result(None)
            await turn
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def __str__(self) -> str:
        return f"{self._inside} responses to finish on the old weights"

    @contextlib.contextmanager
    def emptied(self, seconds: float) -> Iterator[None]:
        """Inside, no request is open. WaitTimeoutError when open ones do not end within `seconds`."""
        with self._changed:
            self._shut = True
        try:
            # `wait_for` gives the lock up while it waits, so that requests can leave; 0.1 s bounds how late a lost rank
            # is seen.
            with self._changed, Wait(self, time.monotonic() + seconds) as waiting:
                while not self._changed.wait_for(lambda: self._inside == 0, min(0.1, seconds / 10)):
                    waiting.check()
            yield
        finally:
            with self._changed:
                self._shut = False
                held = self._held
                self._held = []
            # Futures of asyncio may be settled on their own loop only.
            for loop, turn in held:
                with contextlib.suppress(RuntimeError):  # the loop was closed: no request waits
                    loop.call_soon_threadsafe(_release, turn)

    def _let_in(self) -> bool:
        with self._changed:
            if not self._shut:
                self._inside += 1
            return not self._shut


def check_released(released: bool, old: int, new: int) -> None:
    """TrainingError when the weights became another version without a `release` before: a server that came back
    meanwhile would have been given changed weights as the old version."""
    if new != old and not released:
        raise TrainingError(
            f"version {new} of the weights is published without a release of version {old} before they changed"
        )


def _release(turn: asyncio.Future[None]) -> None:
    # The request may have been cancelled while it waited.
    if not turn.done():
        turn.set_result(None)
