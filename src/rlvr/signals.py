"""Signals: Ctrl-C and SIGTERM stop a run, SIGUSR1 has it say what it is doing.

The first Ctrl-C or SIGTERM asks the run to stop at the next safe point, the second stops it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType


class StopRequest:
    """Inside the `with` block, SIGINT and SIGTERM set `signal` instead of killing; only in the main thread.

    `bool(request)` says whether what runs inside should stop; a second signal raises KeyboardInterrupt where the program
    is. `signal` stays readable after the block.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at_once = False
        """Whether there was a second one."""
        self._inside = False
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self._inside and self.signal is not None

    def __enter__(self) -> StopRequest:
        self.signal, self.at_once, self._inside = None, False, True
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
            self.at_once = True
            raise KeyboardInterrupt
        self.signal = number


@contextlib.contextmanager
def reporting(describe: Callable[[], str]) -> Iterator[None]:
    """Inside, SIGUSR1 writes what `describe` gives to standard error; only in the main thread, and where there is SIGUSR1.

    It is answered when the main thread runs Python code next, so not from inside a long kernel.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        yield
        return

    def answer(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # not print, which may be what was interrupted
            os.write(2, describe().encode(errors="replace") + b"\n")

    before = signal.signal(signal.SIGUSR1, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
