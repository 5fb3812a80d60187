"""Ctrl-C and SIGTERM: the first asks the run to stop at the next safe point, the second stops it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Inside the `with` block, SIGINT and SIGTERM set `signal` instead of killing; only in the main thread.

    `bool(request)` says whether what runs inside should stop; a second signal raises KeyboardInterrupt where the program
    is. `signal` stays readable after the block.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._inside = False
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self._inside and self.signal is not None

    def __enter__(self) -> StopRequest:
        self.signal, self._inside = None, True
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before, self._inside = {}, False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
