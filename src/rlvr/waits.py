"""Named waits: every blocking wait says what it waits for, and has a deadline."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import TypeVar

from rlvr.errors import WaitTimeout

log = logging.getLogger(__name__)
T = TypeVar("T")


def take(
    source: queue.SimpleQueue[T], what: str, deadline: float, interrupted: Callable[[], bool] = lambda: False
) -> T | None:
    """The next item of `source`, or None when `interrupted()` becomes true first.

    Waits at most until `deadline` (time.monotonic seconds) and then raises WaitTimeout that names `what`; says so in the
    log when half of the time has passed.
    """
    start = time.monotonic()
    warned = False
    while True:
        try:
            return source.get(timeout=0.1)
        except queue.Empty:
            now = time.monotonic()
        if interrupted():
            return None
        if now > deadline:
            raise WaitTimeout(f"waited {now - start:.0f} s for {what}, and nothing came before the deadline")
        if not warned and now - start > (deadline - start) / 2:
            log.warning("still waiting for %s after %.0f s (deadline in %.0f s)", what, now - start, deadline - now)
            warned = True
