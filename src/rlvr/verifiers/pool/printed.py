"""Forwards the output of verifier processes through a pipe to the trainer's standard error, with a rate limit.

Invariants, for each pipe: a process that prints never blocks, since the pipe is always read; at most `MOST` bytes, and
one notice that the rest is dropped, are forwarded in each window of `PERIOD` seconds.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

MOST = 2**16
"""Bytes that are forwarded in one window: enough for the tracebacks and prints of a verifier under development."""
PERIOD = 60.0
"""Seconds of a window. The next one begins with the first output after it."""
# One read empties a pipe: without privileges its capacity is at most 1 MiB (default of fs.pipe-max-size).
CHUNK = 2**20
"""Bytes of one read."""
WAITING = 256
"""Chunks that are queued while a write to standard error blocks; further chunks are dropped without a notice."""
STDERR = 2


def forwarded() -> int:
    """Return the write end of a new pipe, whose read end a thread forwards.

    The caller passes it to the process that prints and then closes its own copy, so that the pipe ends with that
    process.
    """
    read_end, write_end = os.pipe()
    # Daemon threads: a blocked standard error must not keep the trainer from exiting.
    threading.Thread(target=_forward, args=(read_end,), name="verifier-prints", daemon=True).start()
    return write_end


def _forward(read_end: int) -> None:
    """Read the pipe until every process that holds its write end has closed it. A second thread writes, since a write
    to standard error may block (a pager, Ctrl-S)."""
    chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(chunks,), name="verifier-prints-out", daemon=True).start()
    began = time.monotonic()
    allowance = MOST
    with os.fdopen(read_end, "rb", buffering=0) as source:
        while data := source.read(CHUNK):
            if time.monotonic() > began + PERIOD:
                began = time.monotonic()
                allowance = MOST
            # The data is read and dropped: an unread pipe would fill up and block the process that prints.
            if not allowance or chunks.qsize() >= WAITING:
                continue
            chunk = data[:allowance]
            allowance -= len(chunk)
            if not allowance:
                chunk += f"\n[verifiers printed more than {MOST >> 10} kB within a minute; more is left out]\n".encode()
            chunks.put(chunk)
    chunks.put(None)


def _write(chunks: queue.SimpleQueue[bytes | None]) -> None:
    while (chunk := chunks.get()) is not None:
        with contextlib.suppress(OSError):  # a closed terminal or a full disk: the chunk is lost
            os.write(STDERR, chunk)
