"""Named waits: every blocking wait says what it waits for, and has a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from rlvr.errors import WaitTimeout

log = logging.getLogger(__name__)


def finished(
    future: Future[Any], what: object, deadline: float, interrupted: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until `future` is done; False when `interrupted()` is true by then, or becomes true.

    Waits at most until `deadline` (time.monotonic seconds) and then raises WaitTimeout that names `what`, as it reads by
    then; says so in the log when half of the time has passed.
    """
    start = time.monotonic()
    warned = False
    while True:
        done, now = wait([future], timeout=0.1).done, time.monotonic()
        if interrupted():
            return False
        if done:
            return True
        if now > deadline:
            raise WaitTimeout(f"waited {now - start:.0f} s for {what}, and nothing came before the deadline")
        if not warned and now - start > (deadline - start) / 2:
            log.warning("still waiting for %s after %.0f s (deadline in %.0f s)", what, now - start, deadline - now)
            warned = True
