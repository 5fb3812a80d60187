"""How long an engine had nothing to do: the seconds without any open request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class IdleClock:
    """Counts open requests, from any thread: `with clock.request(): ...` round each request, `take()` for the idle seconds since the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open, self._idle, self._since = 0, 0.0, time.perf_counter()

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from being made to being answered."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def take(self) -> float:
        """Idle seconds since this was last asked."""
        self._change(0)
        with self._lock:
            idle, self._idle = self._idle, 0.0
            return idle

    def _change(self, by: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if not self._open:
                self._idle += now - self._since
            self._open, self._since = self._open + by, now


class IdleByPhase:
    """An engine's idle seconds by phase of a step."""

    def __init__(self, clock: IdleClock) -> None:
        self._clock = clock
        self.seconds: dict[str | None, float] = {}
        """By phase; None: in none of them."""

    def start(self) -> None:
        """Begin a step."""
        self.seconds.clear()
        self._clock.take()

    def settle(self, phase: str | None) -> None:
        """Give the idle seconds since the last call to a phase, or to none."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._clock.take()
