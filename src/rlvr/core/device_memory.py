"""A GPU's memory: arrays copied there, and how the trainer and an engine beside it hand it to each other."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

CACHE = "cache"
# A thread of a GPU loads 16 bytes at most at once (float4); a start that is no multiple of it splits the load.
ALIGN = 16
"""Bytes: every array begins at a multiple of the widest load of a GPU's thread."""


@dataclass(frozen=True)
class MemoryEvent:
    """A change of the memory that is taken on this rank's device, by the code that makes it."""

    holder: Literal["trainer", "engine"]
    what: str
    nbytes: int
    """Taken where it is positive, freed where it is negative. What the trainer frees stays with torch's allocator until
    the next event `CACHE`, which has 0; what the engine frees goes to the driver."""


_ledger: list[MemoryEvent] | None = None


@contextlib.contextmanager
def recorded_events() -> Iterator[list[MemoryEvent]]:
    """Inside, the memory events of this process are kept in the list, in their order. Not for two threads at once."""
    global _ledger
    _ledger = []
    try:
        yield _ledger
    finally:
        _ledger = None


def record_event(holder: Literal["trainer", "engine"], what: str, nbytes: int) -> None:
    """Keep an event, where events are recorded."""
    if _ledger is not None:
        _ledger.append(MemoryEvent(holder, what, nbytes))


def free_cached(device: torch.device) -> None:
    """Give what torch's allocator keeps for later back to the driver, so that another process can take it."""
    if device.type == "cuda":
        record_event("trainer", CACHE, 0)
        gc.collect()  # tensors in reference cycles count as used
        torch.cuda.empty_cache()


class PeakMemory:
    """The largest memory that torch's allocator held on a GPU in each phase of a step; nothing elsewhere.

    It counts this process: an engine in a process of its own is not in it. Nothing here waits for the device. Memory
    that other code measures by `reset_peak_memory_stats` in the same process is disturbed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated: dict[str, int] = {}
        self._reserved: dict[str, int] = {}

    def start(self) -> None:
        """Begin a step."""
        self._allocated.clear()
        self._reserved.clear()
        self.settle(None)

    def settle(self, phase: str | None) -> None:
        """Give the peaks since the last call to a phase, or to none."""
        if self._device.type != "cuda" or not torch.cuda.is_initialized():
            return  # under ZeRO-3 the first use of the GPU comes after the model is loaded
        if phase is not None:
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            self._allocated[phase] = max(allocated, self._allocated.get(phase, 0))
            self._reserved[phase] = max(reserved, self._reserved.get(phase, 0))
        torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> dict[str, float]:
        """`memory/PHASE`, allocated, and `memory/PHASE_reserved`, in GiB since the step began."""
        allocated = {f"memory/{phase}": size / 2**30 for phase, size in self._allocated.items()}
        return allocated | {f"memory/{phase}_reserved": size / 2**30 for phase, size in self._reserved.items()}


class HostOffload:
    """Keeps the contents of tensors in host memory while their storages hold nothing, and puts them back.

    The storage is emptied, not the tensor replaced, so that every view of it stays valid: DeepSpeed holds many. verl
    does so with Megatron's buffers (`offload_megatron_model_to_cpu`). DeepSpeed's own `offload_states` (0.19.8) drops
    the views that say where a parameter's part is, takes no optimizer but its FusedAdam under ZeRO-3, and is missing
    under ZeRO-1 in bfloat16.

    Between `move_out` and `move_back` the tensors must be read through `on_host` alone: they have no memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device that computes with the tensors. Their copies are in pinned memory where it is a GPU."""
        self._away: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        """By the address of a storage's object: the emptied storage and its bytes on the host."""
        self._spare: dict[int, list[torch.Tensor]] = {}
        """Host memory by size, kept from one round to the next: to pin it takes longer than to copy."""

    def move_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the contents of `tensors` to the host and free their memory on the device; those that are out stay
        there."""
        leaving: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # By storage and not by tensor: views share one, and it is emptied once. The address of the C++ object is
            # stable while `_away` holds the storage.
            key = storage._cdata
            if key in self._away or key in leaving or storage.nbytes() == 0:
                continue
            host = self._host_memory(storage.nbytes())
            # All copies are queued, and waited for once: only then may a storage be emptied.
            host.copy_(_as_bytes(storage), non_blocking=True)
            leaving[key] = storage, host
        # Else a storage would be emptied while its bytes are still being copied.
        self._wait()
        for storage, _ in leaving.values():
            storage.resize_(0)
        record_event("trainer", "offload", -sum(host.nbytes for _, host in leaving.values()))
        self._away |= leaving
        self._spare = {}  # of tensors that are no more

    def move_back(self) -> None:
        """Put all contents back on the device."""
        record_event("trainer", "offload", sum(host.nbytes for _, host in self._away.values()))
        for storage, host in self._away.values():
            storage.resize_(host.nbytes)
            _as_bytes(storage).copy_(host, non_blocking=True)
        # The host's buffers go into `_spare` below, and the next `move_out` writes to them.
        self._wait()
        for _, host in self._away.values():
            self._spare.setdefault(host.nbytes, []).append(host)
        self._away = {}

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself or, where it is out, its contents in host memory, which the next `move_out` may
        overwrite."""
        # A tensor that was never moved, or is back, is read where it is.
        if tensor.untyped_storage()._cdata not in self._away:
            return tensor
        _, host = self._away[tensor.untyped_storage()._cdata]
        view = torch.empty(0, dtype=tensor.dtype, device=host.device)
        return view.set_(host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        if spare := self._spare.get(nbytes):
            return spare.pop()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _wait(self) -> None:
        """Wait for the copies, which run beside the program where the host's memory is pinned."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors of the same shapes and types on `device`; they are views of one buffer.

    They are put there by one copy that the host does not wait for. A copy from pageable memory, and every copy to the
    host, makes the host wait until the device has done all that it was asked for; meanwhile nothing new is asked for,
    and the device runs dry. PyTorch's allocator of pinned memory keeps a buffer until the copies from it are done, so
    that it may be dropped here at once.
    """
    # Rounded up to a multiple of ALIGN: -(-n // a) is ceil(n / a) in integers.
    sizes = [-(-array.nbytes // ALIGN) * ALIGN for array in arrays]
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    host = np.empty(sum(sizes), dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        # A strided array (a slice, a transpose) has no view as bytes: `ascontiguousarray` copies it, and no other.
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    buffer = torch.from_numpy(host)
    if device.type == "cuda":
        buffer = buffer.pin_memory()
    there = buffer.to(device, non_blocking=True)
    return [_view(there, int(start), array) for start, array in zip(starts, arrays, strict=True)]


def _view(buffer: torch.Tensor, start: int, like: np.ndarray) -> torch.Tensor:
    """The part of a buffer of bytes that holds an array's."""
    dtype = torch.from_numpy(np.empty(0, dtype=like.dtype)).dtype
    return buffer[start : start + like.nbytes].view(dtype).view(like.shape)
