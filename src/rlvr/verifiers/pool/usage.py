"""The share of its limits that a worker process uses, since a verifier may hide that it ran out.

A verifier that keeps memory or descriptors of each call runs out some day, and may turn that into an error of its own
or into a score of 0. So no answer is left to a worker that is nearly full, if a fresh one could do better.
"""

from __future__ import annotations

import contextlib
import os
import resource

PAGE = os.sysconf("SC_PAGE_SIZE")
"""Bytes of a page."""
# Arbitrary, as HALF and GROWN: what is left has to suffice for one more answer.
FULL = 0.8
"""Share of a limit from which a worker is full, whatever it started with."""
HALF = 0.5
"""Share from which a worker that has grown is full. One that keeps as much of each call cannot serve another call only
if it is past the half: n calls fit and n + 1 do not, so that n / (n + 1) of the limit are used."""
GROWN = 0.1
"""Share by which a worker must have grown since its first answer: less is the allocator's play, and what a verifier
loads with its first answer would be loaded again by every fresh worker."""


class Usage:
    """This process's use of its address space and descriptors."""

    def __init__(self, memory_mb: int) -> None:
        """Limit the address space to `memory_mb` beyond what the process has now."""
        self._more = memory_mb * 2**20
        self._base = 0
        self._first: float | None = None
        self._now = 0.0
        with contextlib.suppress(OSError, ValueError):  # no /proc; a lower limit is set already
            self._base = _address_space()
            limit = self._base + self._more
            # Address space, not memory in use: RLIMIT_RSS has no effect on Linux.
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    @property
    def full(self) -> bool:
        """Return True if answers of this process cannot be trusted, while those of a fresh process may be."""
        if self._first is None:
            return False
        return self._now > FULL or (self._now > HALF and self._now > self._first + GROWN)

    def measure(self) -> None:
        """Measure the use, after a job."""
        self._now = max(self._memory(), _descriptors())

    def served(self) -> None:
        """Note that a job was answered."""
        if self._first is None:
            self._first = self._now

    def __str__(self) -> str:
        return f"{self._now:.0%} of its memory or descriptors is used after an earlier answer"

    def _memory(self) -> float:
        if not self._base:
            return 0.0
        try:
            return (_address_space() - self._base) / self._more
        except (OSError, MemoryError):
            return 1.0


def _address_space() -> int:
    """Bytes of this process's address space."""
    file = os.open("/proc/self/statm", os.O_RDONLY)  # pathlib and open() take three times as long
    try:
        return int(os.read(file, 64).split(maxsplit=1)[0]) * PAGE
    finally:
        os.close(file)


def _descriptors() -> float:
    """The share of the descriptors that are open. One of them is that of the folder itself."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # no /proc
        return 0.0
    except (OSError, MemoryError):
        return 1.0
    return count / limit if limit > 0 else 0.0
