"""The devices that a plan is made for: those of this machine, or those that `--devices` describes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from rlvr.config import ModelConfig
from rlvr.errors import ConfigError
from rlvr.policy.loading import device_of

GIB = 1 << 30
UNITS = {"GB": 10**9, "GIB": GIB}
CGROUPS = Path("/sys/fs/cgroup")
"""The mount point of control groups, by which containers and batch systems limit memory."""
OWN_CGROUPS = Path("/proc/self/cgroup")
"""The control groups of this process: lines of `hierarchy:controllers:path`, with no controllers in version 2."""


@dataclass(frozen=True)
class Devices:
    """Devices of one kind."""

    count: int
    memory: float
    """Bytes of each."""
    on_gpu: bool = True
    sharing: int = 1
    """Devices that are parts of one machine's memory, as the CPU's of several ranks on a machine are."""

    def __str__(self) -> str:
        kind = "GPU" if self.on_gpu else "CPU"
        return f"{self.count} {kind}{'s' if self.count > 1 else ''} of {self.memory / GIB:.1f} GiB"


def parse_devices(written: str) -> Devices:
    """The GPUs that `COUNTxMEMORY` describes: 8x80GB, 1x24GB, 4x79.2GiB. ConfigError where it is something else."""
    # Matches "8x80GB", "1 X 24 gib" and "4x79.2GiB"; not "80GB", "8x80" or "8x80MB". Six digits bound what float() and
    # the search for larger devices have to take.
    match = re.fullmatch(r"\s*(\d{1,6})\s*[xX]\s*(\d{1,6}(?:\.\d+)?)\s*(GB|GiB)\s*", written, re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f"--devices {written!r} is not COUNTxMEMORY: give a number of GPUs and the memory of each, such as 8x80GB "
            "(GB are 10^9 bytes) or 8x79.2GiB"
        )
    count, size, unit = match.groups()
    memory = float(size) * UNITS[unit.upper()]
    if int(count) == 0 or memory < UNITS["GB"]:
        raise ConfigError(f"--devices {written!r}: at least one GPU of at least 1 GB is needed, such as 8x80GB")
    return Devices(int(count), memory)


def own_devices(config: ModelConfig, ranks: int = 1, ranks_here: int = 1) -> Devices:
    """The device of each of so many ranks, of which `ranks_here` share this machine. ConfigError for a GPU that is not
    there."""
    device = device_of(config)
    if device.type == "cuda":
        return Devices(ranks, torch.cuda.get_device_properties(device).total_memory)
    return Devices(ranks, machine_memory() / ranks_here, on_gpu=False, sharing=ranks_here)


def machine_memory() -> int:
    """Bytes of memory of this machine, or the least that a control group of this process may take."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """Memory limits in bytes of the control groups, of both versions, that this process is in, and of the groups around
    them."""
    try:
        own = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        own = []
    # in a container the path may be that on the host, and the container's own group is at the root
    for line in ["0::/", "0:memory:/", *own]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounted = CGROUPS
            name = "memory.max"
        elif "memory" in controllers.split(","):
            mounted = CGROUPS / "memory"
            name = "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        if ".." in group.parts:  # outside of the process's cgroup namespace
            continue
        # The limit of an outer group holds for all inside it.
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):  # no such group here
                limit = (mounted / folder / name).read_text().strip()
                # Version 1 writes a number near 2^63 for no limit, which the physical memory bounds; version 2 writes
                # `max`.
                if limit.isdigit():
                    yield int(limit)
