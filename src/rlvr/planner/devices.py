"""The devices that a plan is made for: those of this machine, or those that `--devices` describes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from rlvr.config import ModelConfig
from rlvr.errors import ConfigError
from rlvr.policy.loading import device_of

UNITS = {"GB": 10**9, "GIB": 1 << 30}
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory that a container may take, in cgroup v2: bytes, or `max`."""


@dataclass(frozen=True)
class Devices:
    """Devices of one kind."""

    count: int
    memory: float
    """Bytes of each."""
    on_gpu: bool = True

    def __str__(self) -> str:
        kind = "GPU" if self.on_gpu else "CPU"
        return f"{self.count} {kind}{'s' if self.count > 1 else ''} of {self.memory / UNITS['GIB']:.1f} GiB"


def parse_devices(written: str) -> Devices:
    """The GPUs that `COUNTxMEMORY` describes: 8x80GB, 1x24GB, 4x79.2GiB. ConfigError where it is something else."""
    found = re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+(?:\.\d+)?)\s*(GB|GiB)\s*", written, re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"--devices {written!r} is not COUNTxMEMORY: give a number of GPUs and the memory of each, such as 8x80GB (GB are 10^9 bytes) "
            "or 8x79.2GiB"
        )
    count, size, unit = found.groups()
    memory = float(size) * UNITS[unit.upper()]
    if int(count) == 0 or memory < UNITS["GB"]:
        raise ConfigError(f"--devices {written!r}: at least one GPU of at least 1 GB is needed, such as 8x80GB")
    return Devices(int(count), memory)


def own_devices(config: ModelConfig, ranks: int = 1, ranks_here: int = 1) -> Devices:
    """The device of each of so many ranks, of which `ranks_here` share this machine. ConfigError for a GPU that is not there."""
    device = device_of(config)
    if device.type == "cuda":
        return Devices(ranks, torch.cuda.get_device_properties(device).total_memory)
    return Devices(ranks, machine_memory() / ranks_here, on_gpu=False)


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container that the process is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
