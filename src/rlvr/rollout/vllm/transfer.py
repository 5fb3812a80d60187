"""The trainer's end of a publish: weights to one or many engines, bucket by bucket.

`shared_memory` writes each bucket into memory that engines on this machine map; `files` into a folder that servers can
read; `nccl` and `ipc` are vLLM's own weight transfer between GPUs (gpu_transfer). Invariants: never more than one
bucket of the weights is held besides the trainer's own; when `send` returns, every engine that did not fail has all of
it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from rlvr.rollout.engine import Bucket, Published

SHARED_MEMORY = "shared_memory"
# Bytes, a cache line; torch.frombuffer needs the alignment of the widest type (8) at least.
ALIGNMENT = 64

Weights = Callable[[], Iterable[Bucket]]
Call = Callable[..., Any]
"""`call(method, **arguments)`: the method on every engine that takes part; returns when all have answered."""


class Transfer(Protocol):
    """A way for weights to reach engines."""

    def send(self, weights: Weights, call: Call) -> Published:
        """Send everything, from start to finish of the update."""

    def close(self) -> None:
        """Give back what the transfer holds."""


def checksum(tensor: torch.Tensor) -> str:
    """A short digest of a tensor's bytes."""
    # As bytes: numpy has no bfloat16.
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()


class SharedMemoryTransfer:
    """One bucket in anonymous memory (memfd) that processes of the same user open by this process's id.

    There is no name to clean up: the memory goes with its last user. It does not count against the size of /dev/shm,
    which is small in containers. Engines copy before they answer, so one bucket's memory serves all.
    """

    def __init__(self) -> None:
        # Close on exec: a process that is started here must not inherit the memory; the engine opens it by /proc.
        self._file = os.memfd_create("rlvr-weights", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def send(self, weights: Weights, call: Call) -> Published:
        """See the protocol."""
        return _send(weights, call, self._write)

    def _write(self, bucket: Bucket) -> dict[str, Any]:
        layout, size = _layout(bucket)
        _fill(self._memory_of(size), bucket, layout["offsets"])
        return {"path": self.path, **layout}

    def _memory_of(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            # Only ever grown: engines that mapped it before have closed their mapping, and pages stay allocated from
            # bucket to bucket.
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        return self._memory

    def close(self) -> None:
        """See the protocol."""
        self._memory = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FileTransfer:
    """One bucket at a time as a file in a folder that the trainer writes and every server reads, on whatever
    machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0

    def send(self, weights: Weights, call: Call) -> Published:
        """See the protocol."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return _send(weights, call, self._write)

    def _write(self, bucket: Bucket) -> dict[str, Any]:
        """A new file each time: a network file system may show another machine an old one's content."""
        path = self.folder / f"weights-{self._number}"
        # Every server has answered `update_weights` for the file before, so none reads it any more.
        path.unlink(missing_ok=True)
        self._number += 1
        path = self.folder / f"weights-{self._number}"
        layout, size = _layout(bucket)
        with path.open("wb+") as file:
            file.truncate(size)
            with mmap.mmap(file.fileno(), size) as memory:
                _fill(memory, bucket, layout["offsets"])
                memory.flush()
            # Servers on other machines read it through a network file system: it has to be on the server before they
            # are told.
            os.fsync(file.fileno())
        return {"path": str(path), **layout}

    def close(self) -> None:
        """See the protocol."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _send(weights: Weights, call: Call, write: Callable[[Bucket], dict[str, Any]]) -> Published:
    """All buckets in one update, each where `write` puts it."""
    start = time.perf_counter()
    sent = 0
    call("start_weight_update")
    for bucket in weights():
        # Returns when every engine has copied the bucket, so its memory can be used for the next.
        call("update_weights", update_info=write(bucket))
        sent += sum(tensor.nbytes for _, tensor in bucket)
        del bucket  # else it would last until the next one is made
    call("finish_weight_update")
    return Published(sent, time.perf_counter() - start)


def _layout(bucket: Bucket) -> tuple[dict[str, Any], int]:
    """Return the layout of a bucket's tensors in its memory, and its size in bytes."""
    offsets = []
    size = 0
    for _, tensor in bucket:
        offsets.append(size)
        # nbytes rounded up to the alignment
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    layout = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "offsets": offsets,
    }
    return layout, size


def _fill(memory: mmap.mmap, bucket: Bucket, offsets: list[int]) -> None:
    for (_, tensor), offset in zip(bucket, offsets, strict=True):
        target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        target.view(tensor.shape).copy_(tensor)


def mismatched_weights(
    weights: Weights, ask: Callable[[dict[str, list[int]]], list[dict[str, Any]]], dtype: torch.dtype
) -> list[str]:
    """Names of what engines hold otherwise than `weights`: `ask(shapes)` gives what each worker's `rlvr_weights` says.

    Only what a worker can tell is compared: on a CPU most matrices are packed for their kernels and cannot be read
    back; parameters that the update did not reach are known there.
    """
    expected: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    for bucket in weights():
        for name, tensor in bucket:
            expected[name] = checksum(tensor.to(dtype))
            shapes[name] = list(tensor.shape)
    names: set[str] = set()
    for worker in ask(shapes):
        names |= {name for name, held in worker["checksums"].items() if held is not None and held != expected[name]}
        names |= set(worker["unreached"])
    return sorted(names)
