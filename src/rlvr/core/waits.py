"""Waits with a description and a deadline, and the handlers of signals that stop a run or ask for its status.

Every blocking wait has a description of what it waits for and a deadline. It logs a warning when half of its time has
passed. At the deadline it logs the stacks of all threads and raises. It uses the monotonic clock, so a change of the
system time does not affect it.

The first SIGINT (Ctrl-C), SIGTERM or SIGHUP asks the run to stop at the next safe point. A later SIGINT or SIGTERM
stops it at once; a later SIGHUP is ignored. A terminal sends SIGHUP when it is closed; under nohup it stays ignored.
SIGUSR1 makes the run write its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from types import FrameType, TracebackType
from typing import Any, ClassVar

from rlvr.errors import WaitTimeoutError

log = logging.getLogger(__name__)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wait:
    """A wait that polls: `with Wait(what, deadline) as wait: while not ready(): wait.check()`.

    `what` describes the wait. It is formatted anew for each message, so its text may change during the wait. `deadline`
    is in seconds of time.monotonic; infinity means none.
    """

    under_way: ClassVar[dict[int, Wait]] = {}
    """The open waits of this process, by id()."""
    alarms: ClassVar[list[Callable[[], None]]] = []
    """Functions that every check calls. They raise to end every wait, such as when another rank is lost."""

    def __init__(self, what: object, deadline: float) -> None:
        self.what = what
        self.deadline = deadline
        self.began = time.monotonic()
        self._warned = False

    def __enter__(self) -> Wait:
        self.under_way[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.under_way.pop(id(self), None)

    def __str__(self) -> str:
        now = time.monotonic()
        if math.isinf(self.deadline):
            remaining = "no deadline"
        else:
            remaining = f"deadline in {max(0.0, self.deadline - now):.0f} s"
        return f"{self.what} for {now - self.began:.0f} s ({remaining})"

    def check(self) -> None:
        """Log a warning when half of the time has passed. At the deadline, log the stacks of all threads and raise
        WaitTimeoutError. An error of an alarm is raised, too."""
        # A copy, since a heartbeat monitor that closes during the loop removes its alarm.
        for alarm in list(self.alarms):
            alarm()
        now = time.monotonic()
        if now > self.deadline:
            # Logged here, since a caller may catch the error and show one line; the stacks tell which thread hangs.
            log.error("gave up waiting for %s; the stacks of all threads:\n%s", self, stacks())
            raise WaitTimeoutError(
                f"waited {now - self.began:.0f} s for {self.what}, and nothing came before the deadline"
            )
        if not self._warned and now - self.began > (self.deadline - self.began) / 2:
            log.warning("still waiting for %s", self)
            self._warned = True


def finished(
    future: Future[Any], what: object, deadline: float, interrupted: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until `future` is done and return True; return False as soon as `interrupted()` is true, also if it is done.

    At `deadline` (time.monotonic seconds) raise WaitTimeoutError with the text that `what` has at that time.
    """
    with Wait(what, deadline) as waiting:
        while True:
            # Short waits instead of one until the deadline, so that Python handles signals and `interrupted` is called
            # ten times a second.
            done = wait([future], timeout=0.1).done
            if interrupted():
                return False
            if done:
                return True
            waiting.check()


def stacks() -> str:
    """Return the current stack of every thread, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


class StopRequest:
    """Inside the `with` block, the first SIGINT, SIGTERM or SIGHUP sets `signal` instead of ending the process.

    Handlers are set only where the block is entered in the main thread. Inside the block, `bool(request)` is true once
    a signal has come, or `reason` is set. A later SIGINT or SIGTERM raises KeyboardInterrupt in the main thread; a
    later SIGHUP is ignored. If the first signal was SIGHUP, the process ignores SIGHUP also after the block. `signal`
    keeps its value after the block. `reply` is written to standard error at the first signal, unless it is SIGHUP.
    """

    def __init__(self, reply: str = "") -> None:
        self._reply = reply
        self.signal: int | None = None
        self.reason: str | None = None
        """The other party that asked for the stop, in words: a callback of a run, once the step is over."""
        self.at_once = False
        """True if a second SIGINT or SIGTERM came."""
        self._inside = False
        self._previous_handlers: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self._inside and (self.signal is not None or self.reason is not None)

    def __enter__(self) -> StopRequest:
        self.signal = None
        self.reason = None
        self.at_once = False
        self._inside = True
        # Python allows handlers in the main thread only. In another thread (of a notebook, a test) no signal is caught.
        if threading.current_thread() is threading.main_thread():
            # Under nohup the run continues after its terminal is closed, so SIGHUP stays ignored.
            nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            handled = [number for number in STOPPING if not (nohup and number == signal.SIGHUP)]
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.signal == signal.SIGHUP and signal.SIGHUP in self._previous_handlers:
            self._previous_handlers[signal.SIGHUP] = signal.SIG_IGN  # a second SIGHUP may come while the run closes
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous_handlers = {}
        self._inside = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP:  # a shell that exits sends SIGHUP again to each of its jobs
                return
            # The next safe point may be minutes away, so the second request does not wait for it.
            self.at_once = True
            raise KeyboardInterrupt
        self.signal = number
        if self._reply and number != signal.SIGHUP:  # after SIGHUP there is no terminal to write to
            with contextlib.suppress(OSError):  # not `print`: the signal may have interrupted a print
                os.write(2, f"{self._reply}\n".encode())


def until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Run `work` on an event loop to its end, 0, or until SIGINT or SIGTERM cancels it, whose number is returned.

    For the main thread; a second signal ends the process as without this.
    """
    stopped = 0

    async def run() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            nonlocal stopped
            stopped = number
            task.cancel()
            for handled in (signal.SIGINT, signal.SIGTERM):  # a second one stops at once
                loop.remove_signal_handler(handled)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    return stopped


_descriptions: list[Callable[[], str]] = []
"""The `describe` functions of the open `reporting` blocks. SIGUSR1 calls the last one, of the innermost block."""


@contextlib.contextmanager
def reporting(describe: Callable[[], str]) -> Iterator[None]:
    """Inside the block, SIGUSR1 writes the text of `describe` to standard error. Without effect outside the main thread
    and on systems without SIGUSR1.

    A separate thread writes it, so it also comes while the main thread is inside a CUDA kernel or a collective. Python
    has one wakeup descriptor for each process; where another user (an event loop in the main thread) has set it, the
    main thread writes the text. An inner block replaces the description until it ends.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        yield
        return
    _descriptions.append(describe)
    try:
        # Only the outermost block sets the handler and starts the thread; inner blocks replace the description.
        with _answering() if len(_descriptions) == 1 else contextlib.nullcontext():
            yield
    finally:
        _descriptions.pop()


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Inside the block, each SIGUSR1 writes the text of the innermost description."""

    def answer() -> None:
        try:
            text = _descriptions[-1]()
        except Exception as error:  # `describe` reads state that other threads change
            text = f"the run cannot be described: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # not `print`: the signal may have interrupted a print
            os.write(2, text.encode(errors="replace") + b"\n")

    def answer_all() -> None:
        while numbers := os.read(read_end, 64):  # one byte, the signal number, for each signal of the process
            for _ in range(numbers.count(signal.SIGUSR1)):
                answer()

    read_end, write_end = os.pipe()
    # `set_wakeup_fd` requires a descriptor that does not block.
    os.set_blocking(write_end, False)
    # The C handler writes the number of each signal to this descriptor at once. A handler in Python runs only when the
    # main thread returns to the interpreter, which a CUDA kernel or a collective may delay for minutes.
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if previous_fd != -1:
        # An event loop in the main thread, as in a notebook, had set a descriptor: restore it.
        signal.set_wakeup_fd(previous_fd)
    answering = threading.Thread(target=answer_all, name="rlvr-status", daemon=True)
    answering.start()
    # Even with a wakeup descriptor a handler is needed: without one SIGUSR1 ends the process.
    before = signal.signal(signal.SIGUSR1, lambda *_: answer() if previous_fd != -1 else None)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        if previous_fd == -1:
            signal.set_wakeup_fd(-1)
        # Closing the write end makes the thread's `os.read` return b"", which ends the thread. The read end is closed
        # after the thread has ended.
        os.close(write_end)
        answering.join()
        os.close(read_end)
