"""Waits with names and deadlines, and the signals that stop a run or ask what it is doing.

Every blocking wait says what it waits for, and has a deadline. At half of its deadline a wait warns; at the end it
writes the stacks of all threads to the log and raises. Time is monotonic, so a clock that jumps neither ends a wait nor
prolongs it.

Ctrl-C, SIGTERM and SIGHUP stop a run, SIGUSR1 has it say what it is doing. The first of the three asks the run to stop
at the next safe point, a second Ctrl-C or SIGTERM stops it at once. SIGHUP, which a terminal that is closed sends, is
left alone where it is ignored (nohup), and is ignored once one was taken.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType, TracebackType
from typing import Any, ClassVar

from rlvr.errors import WaitTimeoutError

log = logging.getLogger(__name__)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wait:
    """A wait that is under way: `with Wait(what, deadline) as wait: while not there: wait.check()`.

    `what` is put into text each time that a message needs it, so that it may change; `deadline` is in time.monotonic
    seconds.
    """

    under_way: ClassVar[dict[int, Wait]] = {}
    """All of the process, by id."""
    alarms: ClassVar[list[Callable[[], None]]] = []
    """Called at every check; they raise where no wait makes sense any more (a rank of the run is lost)."""

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
        """Warn when half of the time has passed; WaitTimeoutError, after the stacks of all threads, when all of it has.
        Raises what an alarm raises."""
        # A copy: another World may be closed meanwhile, which takes its alarm out.
        for alarm in list(self.alarms):
            alarm()
        now = time.monotonic()
        if now > self.deadline:
            # Before the error is raised: it may be caught and shown in one line, and the stacks say which thread hangs.
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
    """Wait until `future` is done; False when `interrupted()` is true by then, or becomes true.

    Waits at most until `deadline` (time.monotonic seconds) and then raises WaitTimeoutError that names `what`, as it
    reads by then.
    """
    with Wait(what, deadline) as waiting:
        while True:
            # Not one wait to the deadline: Python handles a signal, and `interrupted` is asked, ten times a second.
            done = wait([future], timeout=0.1).done
            if interrupted():
                return False
            if done:
                return True
            waiting.check()


def stacks() -> str:
    """Return where every thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


class StopRequest:
    """Inside the `with` block, SIGINT, SIGTERM and SIGHUP set `signal` instead of killing; only in the main thread.

    `bool(request)` says whether what runs inside should stop; a second signal raises KeyboardInterrupt where the
    program is. After a SIGHUP the process ignores others to its end: no terminal is left that could go. `signal` stays
    readable after the block. `reply` is written to standard error at the first one.
    """

    def __init__(self, reply: str = "") -> None:
        self._reply = reply
        self.signal: int | None = None
        self.at_once = False
        """Whether there was a second one."""
        self._inside = False
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self._inside and self.signal is not None

    def __enter__(self) -> StopRequest:
        self.signal = None
        self.at_once = False
        self._inside = True
        # Python sets handlers in the main thread only; elsewhere (a notebook's worker, a test) the block stops nothing.
        if threading.current_thread() is threading.main_thread():
            # Under nohup the run is to outlive its terminal.
            nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            heard = [number for number in STOPPING if not (nohup and number == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._ask) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.signal == signal.SIGHUP and signal.SIGHUP in self._before:
            self._before[signal.SIGHUP] = signal.SIG_IGN  # the second may come while the run is being closed
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
        self._inside = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP:  # a shell that ends sends it again to each of its jobs
                return
            # The first request was taken for the next safe point, which may be far.
            self.at_once = True
            raise KeyboardInterrupt
        self.signal = number
        if self._reply and number != signal.SIGHUP:  # after which there is no terminal
            with contextlib.suppress(OSError):  # not print, which may be what was interrupted
                os.write(2, f"{self._reply}\n".encode())


_descriptions: list[Callable[[], str]] = []
"""Those of the `reporting` blocks that the main thread is in; the innermost, which is the last, is what SIGUSR1
writes."""


@contextlib.contextmanager
def reporting(describe: Callable[[], str]) -> Iterator[None]:
    """Inside, SIGUSR1 writes what `describe` gives to standard error; only in the main thread, and where there is
    SIGUSR1.

    A thread answers, so that the answer also comes while the main thread is inside a long kernel or a collective. Where
    somebody else (an event loop in the main thread) already has Python's one wakeup descriptor, the main thread
    answers. A block inside another one replaces the description until it ends.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        yield
        return
    _descriptions.append(describe)
    try:
        # The outermost block owns handler and thread; those inside only replace the text.
        with _answering() if len(_descriptions) == 1 else contextlib.nullcontext():
            yield
    finally:
        _descriptions.pop()


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Inside, SIGUSR1 is answered."""

    def answer() -> None:
        try:
            text = _descriptions[-1]()
        except Exception as error:  # it reads what other threads change
            text = f"the run cannot be described: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # not print, which may be what was interrupted
            os.write(2, text.encode(errors="replace") + b"\n")

    def answer_all() -> None:
        while numbers := os.read(received, 64):  # each signal of the process writes its number
            for _ in range(numbers.count(signal.SIGUSR1)):
                answer()

    received, sent = os.pipe()
    # Required by `set_wakeup_fd`: a handler that blocks on a full pipe would stop the process.
    os.set_blocking(sent, False)
    # The C handler writes the number of each signal to this descriptor at once, while Python's own handler waits for
    # the main thread to return to the interpreter, which a CUDA kernel or a collective may keep for minutes.
    others = signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    if others != -1:
        # An event loop in the main thread, as in a notebook, had one, and gets it back.
        signal.set_wakeup_fd(others)
    answering = threading.Thread(target=answer_all, name="rlvr-status", daemon=True)
    answering.start()
    # A handler has to be set, even an empty one: without it SIGUSR1 ends the process.
    before = signal.signal(signal.SIGUSR1, lambda *_: answer() if others != -1 else None)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        if others == -1:
            signal.set_wakeup_fd(-1)
        # The end of the pipe ends the thread's read, and with it the thread; only then may the other end be closed.
        os.close(sent)
        answering.join()
        os.close(received)
