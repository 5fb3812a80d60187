"""Clocks and memory of a device, the same calls on a GPU and on a CPU."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
WARM_UP = 2
"""Calls before those that are timed: they load kernels and fill the allocator's cache."""


def synchronize(device: str) -> None:
    """Wait for what was started on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Median time of a call, the device's work included."""
    for _ in range(WARM_UP):
        function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return round(statistics.median(times), 4)


class Peak:
    """The most memory that was taken inside of a block, beyond what was taken before it."""

    mib: float | None = None
    """None where the system does not say."""


@contextlib.contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Measure the memory of a block: of a GPU what torch's allocator handed out; of a CPU what was resident, which is
    coarse."""
    found = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield found
        torch.cuda.synchronize()
        found.mib = round((torch.cuda.max_memory_allocated() - before) / MIB, 1)
        return
    with contextlib.suppress(OSError):  # the peak counts from the start of the process then
        Path("/proc/self/clear_refs").write_text("5")
    resident = _resident("VmRSS")
    yield found
    highest = _resident("VmHWM")
    if resident is not None and highest is not None:
        found.mib = round((highest - resident) / MIB, 1)


def _resident(field: str) -> int | None:
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def free_gib() -> float:
    """GiB of the GPU that nobody holds, this process and others."""
    free, _ = torch.cuda.mem_get_info()
    return round(free / 2**30, 3)


def matrix_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a square matrix product of random numbers: the ceiling that utilization is a share of."""
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / (milliseconds(lambda: left @ right, device, repeats=10) / 1000)


def copy_rate(device: str, nbytes: int) -> float:
    """Bytes per second of a copy within the device's memory, read and written ones counted."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * nbytes / (milliseconds(lambda: target.copy_(source), device, repeats=10) / 1000)
