"""Arrays of host memory put on a device by one copy that the host does not wait for.

A copy from pageable memory, and every copy to the host, makes the host wait until the device has done all that it was asked
for; meanwhile nothing new is asked for, and the device runs dry. PyTorch's allocator of pinned memory keeps a buffer until
the copies from it are done, so that it may be dropped here at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGN = 16
"""Bytes: every array begins at a multiple of the widest load of a GPU's thread."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors of the same shapes and types on `device`; they are views of one buffer."""
    sizes = [-(-array.nbytes // ALIGN) * ALIGN for array in arrays]
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    host = np.empty(sum(sizes), dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=True):
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
