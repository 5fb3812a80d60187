"""Forwards what verifiers print in their processes to the standard error of the trainer, up to a rate.

Invariant: a process that prints is never held up, and however much it prints, a log grows by `MOST` bytes a minute at
most.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

MOST = 2**16
"""Bytes that are forwarded in any `PERIOD`: enough for the tracebacks and remarks of a verifier that is being
written."""
PERIOD = 60.0
# One read empties a pipe, whose capacity is at most this (fs.pipe-max-size) for an unprivileged process.
CHUNK = 2**20
WAITING = 256
"""Chunks that wait while nobody reads standard error; those that come then are dropped."""
STDERR = 2


def forwarded() -> int:
    """The file descriptor to print to; close it once the process that prints has it. A thread reads the other end."""
    reads, writes = os.pipe()
    # Daemons: a log that nobody reads must not keep the program from ending.
    threading.Thread(target=_forward, args=(reads,), name="verifier-prints", daemon=True).start()
    return writes


def _forward(reads: int) -> None:
    """Copy until the last process that prints has ended. Another thread writes, which may wait for a reader (a pager,
    Ctrl-S)."""
    texts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(texts,), name="verifier-prints-out", daemon=True).start()
    began = time.monotonic()
    allowance = MOST
    with os.fdopen(reads, "rb", buffering=0) as source:
        while data := source.read(CHUNK):
            if time.monotonic() > began + PERIOD:
                began = time.monotonic()
                allowance = MOST
            # Read and dropped: not reading would fill the pipe and stop the process that prints.
            if not allowance or texts.qsize() >= WAITING:
                continue
            shown = data[:allowance]
            allowance -= len(shown)
            if not allowance:
                shown += f"\n[verifiers printed more than {MOST >> 10} kB within a minute; more is left out]\n".encode()
            texts.put(shown)
    texts.put(None)


def _write(texts: queue.SimpleQueue[bytes | None]) -> None:
    while (shown := texts.get()) is not None:
        with contextlib.suppress(OSError):  # a closed terminal or a full disk: printing goes nowhere
            os.write(STDERR, shown)
