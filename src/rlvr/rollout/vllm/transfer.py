"""The trainer's end of a publish: weights to one or many engines, bucket by bucket.

`shared_memory` writes each bucket into memory that engines on this machine map; `nccl` and `ipc` are vLLM's own weight
transfer between GPUs; `files` writes safetensors to a folder that servers can read. Invariants: never more than one bucket
of the weights is held besides the trainer's own; when `send` returns, every engine that did not fail has all of it.
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
ALIGNMENT = 64

Weights = Callable[[], Iterable[Bucket]]
Call = Callable[..., Any]
"""`call(method, **arguments)`: the method on every engine that takes part; returns when all have answered."""


class Transfer(Protocol):
    """A way for weights to reach engines."""

    def send(self, weights: Weights, call: Call) -> Published:
        """Send everything, from start to finish of the update."""
        ...

    def close(self) -> None:
        """Give back what the transfer holds."""
        ...


def checksum(tensor: torch.Tensor) -> str:
    """A short digest of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class SharedMemoryTransfer:
    """One bucket in anonymous memory (memfd) that processes of the same user open by this process's id.

    There is no name to clean up: the memory goes with its last user. It does not count against the size of /dev/shm, which
    is small in containers. Engines copy before they answer, so one bucket's memory serves all.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("rlvr-weights", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def send(self, weights: Weights, call: Call) -> Published:
        """See the protocol."""
        start, sent = time.perf_counter(), 0
        call("start_weight_update")
        for bucket in weights():
            call("update_weights", update_info=self._write(bucket))
            sent += sum(tensor.nbytes for _, tensor in bucket)
        call("finish_weight_update")
        return Published(sent, time.perf_counter() - start)

    def _write(self, bucket: Bucket) -> dict[str, Any]:
        offsets, size = [], 0
        for _, tensor in bucket:
            offsets.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._room_for(size)
        for (_, tensor), offset in zip(bucket, offsets, strict=True):
            target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            target.view(tensor.shape).copy_(tensor)
        return {
            "path": self.path,
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "offsets": offsets,
        }

    def _room_for(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
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
    """A folder of safetensors files, one a bucket, that every server reads with `reload_weights`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def send(self, weights: Weights, call: Call) -> Published:
        """See the protocol."""
        from safetensors.torch import save_file

        start, sent = time.perf_counter(), 0
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for number, bucket in enumerate(weights()):
            # A tied head shares its memory with the embedding, which safetensors refuses to write.
            save_file({name: tensor.detach().cpu().clone() for name, tensor in bucket}, self.folder / f"{number:05}.safetensors")
            sent += sum(tensor.nbytes for _, tensor in bucket)
        call("reload_weights", weights_path=str(self.folder))
        return Published(sent, time.perf_counter() - start)

    def close(self) -> None:
        """See the protocol."""
        shutil.rmtree(self.folder, ignore_errors=True)


def differing(weights: Weights, ask: Callable[[dict[str, list[int]]], list[dict[str, Any]]], dtype: torch.dtype) -> list[str]:
    """Names of what engines hold otherwise than `weights`: `ask(shapes)` gives what each worker's `rlvr_weights` says.

    Only what a worker can tell is compared: on a CPU most matrices are packed for their kernels and cannot be read back;
    parameters that the update did not reach are known there.
    """
    expected: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    for bucket in weights():
        for name, tensor in bucket:
            expected[name], shapes[name] = checksum(tensor.to(dtype)), list(tensor.shape)
    found: set[str] = set()
    for worker in ask(shapes):
        found |= {name for name, held in worker["checksums"].items() if held is not None and held != expected[name]}
        found |= set(worker["unreached"])
    return sorted(found)
