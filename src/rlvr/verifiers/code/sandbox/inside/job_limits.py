"""The limits of a job and the parts of a tier, which the supervisor and the process of the program read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

TMP = "/tmp"
STREAMS = "/proc/fd"
"""Folder in which a program in namespaces of its own finds its standard streams; `/dev/stdin` and the like are links
into it."""


@dataclass(frozen=True)
class Setting:
    """Parts of a tier, for a zygote and its jobs."""

    user: int | None = None
    """Number of the user to change to; None: no change."""
    namespaces: bool = True
    landlock: bool = True
    seccomp: bool = True
    tmp: str = TMP
    """The one writable folder."""
    readable: tuple[str, ...] = ("/",)
    socket_bytes: int = 212_992
    """Bytes that the kernel buffers for one socket (net.core.wmem_default)."""
    processes_beside: int | None = 1
    """Number of processes of the same user that the kernel counts beside the program's own; None: they cannot be
    limited."""
    packages: tuple[str, ...] = ()
    """Packages that are imported before there is a program."""
    place: str = ""
    """The folder of these packages."""


class Order(NamedTuple):
    """The limits of a job, as the trainer sends them (see `runner.Limits`), and how to give them to a program."""

    seconds: float
    memory_mb: int
    output_bytes: int
    processes: int
    file_mb: int
    address_space: bool = True
    """Limit what a process may map to the memory that all may use; V8 maps gigabytes that it never uses."""
    cpu_seconds: float | None = None

    @property
    def cpu_limit(self) -> int:
        """Whole seconds of processor time; by default more than the wall clock, so that only several threads get there
        first."""
        if self.cpu_seconds is None:
            # RLIMIT_CPU counts whole seconds. One more than the wall clock, so that a single busy thread is ended by
            # the clock, with its own reason.
            return math.ceil(self.seconds) + 1
        return math.ceil(self.cpu_seconds)
