"""A time limit that counts only the time in which this event loop ran.

The trainer may be held up: stopped by a signal, suspended with its machine, or in a C call that keeps the interpreter
lock. A reply that came meanwhile waits in its socket, and a worker that was stopped along did nothing. Neither is late.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

# Arbitrary: more parts notice shorter hold-ups, and cost a timer each.
TICKS = 8
"""Parts of a limit. A part that took twice its time or more is not counted, so that one hold-up costs at most an eighth
of the limit. As many parts are given again at most: an answer that hangs in a loop that is always late ends, too."""


class Deadline:
    """`async with Deadline(seconds)`: as asyncio.timeout, with TimeoutError past `seconds` during which the loop ran.

    What had come before the last timer fired is handled first.
    """

    def __init__(self, seconds: float) -> None:
        self._tick = seconds / TICKS
        self._counted = 0
        self._given_again = 0
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def expired(self) -> bool:
        """True once the limit has passed: a TimeoutError is this one's, and not of what it limits."""
        return self._timeout.expired()

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _start(self) -> None:
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._tick, self._passed)

    def _passed(self) -> None:
        # The timer fired a whole part late: the loop did not run, or the process was stopped.
        held_up = self._loop.time() - self._since >= 2 * self._tick
        if held_up and self._given_again < TICKS:
            self._given_again += 1
        else:
            self._counted += 1
        if self._counted < TICKS:
            self._start()
        else:
            # asyncio.timeout cancels in the next turn of the loop, after what this turn has read from sockets.
            self._timeout.reschedule(self._loop.time())
