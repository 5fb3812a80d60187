"""Named waits: every blocking wait says what it waits for, and has a deadline.

At half of its deadline a wait warns; at the end it writes the stacks of all threads to the log and raises. Time is
monotonic, so a clock that jumps neither ends a wait nor prolongs it.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, ClassVar

from rlvr.errors import WaitTimeout

log = logging.getLogger(__name__)


class Wait:
    """A wait that is under way: `with Wait(what, deadline) as wait: while not there: wait.check()`.

    `what` is read again whenever it is said, `deadline` in time.monotonic seconds.
    """

    under_way: ClassVar[dict[int, Wait]] = {}
    """All of the process, by id."""
    alarms: ClassVar[list[Callable[[], None]]] = []
    """Called at every check; they raise where no wait makes sense any more (a rank of the run is lost)."""

    def __init__(self, what: object, deadline: float) -> None:
        self.what, self.deadline = what, deadline
        self.began = time.monotonic()
        self._warned = False

    def __enter__(self) -> Wait:
        self.under_way[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.under_way.pop(id(self), None)

    def __str__(self) -> str:
        now = time.monotonic()
        left = "no deadline" if math.isinf(self.deadline) else f"deadline in {max(0.0, self.deadline - now):.0f} s"
        return f"{self.what} for {now - self.began:.0f} s ({left})"

    def check(self) -> None:
        """Warn when half of the time has passed; WaitTimeout, after the stacks of all threads, when all of it has. Raises what
        an alarm raises."""
        for alarm in list(self.alarms):
            alarm()
        now = time.monotonic()
        if now > self.deadline:
            log.error("gave up waiting for %s; the stacks of all threads:\n%s", self, stacks())
            raise WaitTimeout(f"waited {now - self.began:.0f} s for {self.what}, and nothing came before the deadline")
        if not self._warned and now - self.began > (self.deadline - self.began) / 2:
            log.warning("still waiting for %s", self)
            self._warned = True


def finished(
    future: Future[Any], what: object, deadline: float, interrupted: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until `future` is done; False when `interrupted()` is true by then, or becomes true.

    Waits at most until `deadline` (time.monotonic seconds) and then raises WaitTimeout that names `what`, as it reads by
    then.
    """
    with Wait(what, deadline) as waiting:
        while True:
            done = wait([future], timeout=0.1).done
            if interrupted():
                return False
            if done:
                return True
            waiting.check()


def stacks() -> str:
    """Where every thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )
