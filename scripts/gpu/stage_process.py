"""Run a stage in a process of its own, with a limit: past the limit, the process and all that it started are
ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""Between the request to end and the kill."""
EXIT_SECONDS = 30.0
"""That a process may take to exit once its work is done, past its limit where that comes first: engines and workers end
in seconds, and a hang there is not to cost the time of later stages."""
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int | None
    """Its exit status, negative for a signal; None where it was killed here."""
    seconds: float
    timed_out: bool = False
    lingered: bool = False
    """Its work was done and it did not exit."""


def adopt_orphans() -> None:
    """Become the parent of what a stage leaves behind, so that it can be found and ended, whatever session it moved
    to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    seconds: float,
    stopped: Callable[[], bool],
    done: Callable[[], bool],
) -> Outcome:
    """Run a command, its output appended to a file, until it ends, `seconds` have passed, or `stopped()`.

    No process that it started is left. `done()`: its work is done, so that it has EXIT_SECONDS from then to exit,
    however much of its limit is left.
    """
    start = time.monotonic()
    end = start + seconds
    lingers_from: float | None = None
    with output.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not stopped():
                time.sleep(POLL_SECONDS)
                if lingers_from is None and done():
                    lingers_from = time.monotonic()
                    end = lingers_from + EXIT_SECONDS
                if time.monotonic() >= end:
                    break
            code = process.poll()
        finally:
            end_descendants(process)
    lingered = code is None and lingers_from is not None
    timed_out = code is None and not lingered and not stopped()
    return Outcome(code, time.monotonic() - start, timed_out, lingered)


def end_descendants(process: subprocess.Popen[bytes]) -> None:
    """End every process below this one: ask, wait, kill. A killed parent's children come to this process
    (`adopt_orphans`)."""
    kill_at = time.monotonic() + GRACE_SECONDS
    asked: set[int] = set()
    while found := _descendants():
        for pid in found:
            late = time.monotonic() > kill_at
            if late or pid not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        time.sleep(POLL_SECONDS)
        process.poll()
        _reap(process.pid)


def _descendants() -> list[int]:
    """Living processes whose parents lead to this one."""
    parents = {pid: parent for pid, state, parent in _processes() if state not in "ZX"}
    found = [os.getpid()]
    for pid in found:  # grows while it is gone through
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _reap(own: int) -> None:
    """Take the exit statuses of adopted processes; that of the stage itself belongs to its Popen."""
    for pid, state, parent in list(_processes()):
        if state == "Z" and parent == os.getpid() and pid != own:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def _processes() -> Iterator[tuple[int, str, int]]:
    """(pid, state, parent) of every process. Linux, by /proc."""
    # Not by Path.glob, which raises ProcessLookupError where one ends between its name and its file.
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            state, parent = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:2]
            yield int(name), state, int(parent)
