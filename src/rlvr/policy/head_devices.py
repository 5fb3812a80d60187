"""Choices of the fused head by device: the size of its tiles, Triton kernels where triton is installed, wide sums."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

COLUMNS = 1 << 14
"""Vocabulary entries of a tile: 2,048 tokens by 16,384 entries, whose operations take longer than their launches. The
kernels need one buffer for it, 64 MiB in bfloat16."""
LOGITS = 1 << 25
"""Logits of that tile."""
NARROWEST = 1 << 11
"""Vocabulary entries of the narrowest tile."""
# Four tiles in float32 are there at once without Triton: the logits, their gradient, and both in the inputs' type.
SHARE = 128
"""Four tiles in float32 take at most this part of the device's memory, one in so many; else they are narrower."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TileSize:
    """Sizes of a tile of logits [t, v]."""

    entries: int
    """Most vocabulary entries v"""
    logits: int
    """Most logits t x v, but for a tile of one token"""

    def of(self, tokens: int, vocabulary: int) -> tuple[int, int]:
        """The tokens t and the entries v of the largest tile of logits [tokens, vocabulary]."""
        width = min(vocabulary, self.entries)
        return min(tokens, max(1, self.logits // max(1, width))), width


def has_triton() -> bool:
    """Return True if triton is installed."""
    return find_spec("triton") is not None


@cache
def triton_kernels() -> ModuleType | None:
    """Return `rlvr.policy.head_kernels`; None where triton is not installed, with one warning."""
    if not has_triton():
        logger.warning(
            "triton is not installed (pip install triton): the LM head takes some thirty operations a tile, not two"
        )
        return None
    return import_module("rlvr.policy.head_kernels")


@cache
def gpu_tile(device: torch.device) -> TileSize:
    """The sizes of tiles on a device that is no CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return TileSize(COLUMNS, LOGITS)
    return tile_for(torch.cuda.get_device_properties(device).total_memory)


def tile_for(memory: float) -> TileSize:
    """The sizes of tiles on a GPU of so many bytes of memory.

    From the memory that it has, not from what is free: the same run has the same tiles and so the same bits.
    """
    entries = COLUMNS
    logits = LOGITS
    # 16 bytes a logit: four tiles of float32.
    while 16 * logits * SHARE > memory and entries > NARROWEST:
        entries //= 2
        logits //= 2
    return TileSize(entries, logits)


@cache
def sums_wide(device: torch.device) -> bool:
    """Return True if products of bfloat16 can be added to float32 in one kernel.

    Where Liger-Kernel does (linkedin/Liger-Kernel ead96b6, src/liger_kernel/ops/fused_linear_cross_entropy.py): torch's
    `out_dtype` on NVIDIA GPUs of compute capability 8 and above.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8
