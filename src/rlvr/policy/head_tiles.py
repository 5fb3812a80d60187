"""The tiles in which the fused LM head computes logits: their sizes, their order and their buffers.

Buffers are allocated once for a pass and used for every tile. The memory plan (`rlvr.planner.micro_batch`) makes the
same buffers of tensors without storage and adds up their bytes, so that what it counts is what the head takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlvr.policy.head_devices import TileSize, gpu_tile

# 1,024 to 4,096 entries by 128 to 1,024 tokens differ by less than noise on one core (docs/performance.md, "The fused
# head"); tiles of whole vocabulary rows take 1.5 times as long, since each reads all weights again.
COLUMNS = 2048
"""Vocabulary entries of a tile."""
TILE = 1 << 20
"""Logits of a tile: 4 MiB in float32, which stay in a CPU's cache."""
# Keeping three times as much saved a product and no time there: 48 MiB are written and read twice.
KEEP = 1 << 22
"""Up to so many logits are one tile and are kept for the backward pass: 16 MiB in float32."""


@dataclass(frozen=True)
class TilePlan:
    """Values that do not change between the forward and the backward pass."""

    asked: dict[str, bool]
    terms: int
    scale: float
    cap: float | None
    vocabulary: int
    tile: TileSize
    kernels: bool
    """True if `rlvr.policy.head_kernels` computes the passes over a tile, and writes the gradient in place of the
    logits; False: operations of torch do."""
    wide_sums: bool
    """True if a product in the inputs' type is added to float32 without a tensor between."""
    common_temperature: float | None = None
    """The temperature that all tokens share, where it is known without a read from the device; else None."""

    @property
    def inner_factor(self) -> float | None:
        """Return the factor inside the soft-cap's tanh; None: there is no cap."""
        return None if self.cap is None else self.scale / self.cap

    @property
    def last_factor(self) -> float:
        """Return the last factor of a tile before its division by the temperatures."""
        return self.scale if self.cap is None else self.cap

    def largest(self, tokens: int) -> tuple[int, int]:
        """Tokens and vocabulary entries of the largest tile of the logits of so many tokens."""
        if fits(tokens, self):
            return tokens, self.vocabulary
        return self.tile.of(tokens, self.vocabulary)


class HeadBuffers:
    """Buffers for tiles of t tokens and v entries: of one forward pass, or of one backward pass."""

    def __init__(
        self,
        plan: TilePlan,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        trained: Sequence[bool] | None = None,
    ) -> None:
        """`inputs` [T, H_i] and `weights` [V, H_i] of each term decide sizes, types and the device. `trained`: which
        weights get a gradient, in a backward pass; None: in a forward pass."""
        tokens, entries = plan.largest(len(inputs[0]))
        narrow = inputs[0].dtype
        wide = torch.promote_types(narrow, torch.float32)
        device = inputs[0].device
        # A kernel converts what it reads, so one product can stay in its own type; several are summed in float32.
        kind = narrow if plan.kernels and len(weights) <= 1 else wide
        backward = trained is not None

        def flat(dtype: torch.dtype, numbers: int = tokens * entries) -> torch.Tensor:
            return torch.empty(numbers, dtype=dtype, device=device)

        def rows(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(entries, weight.shape[1], dtype=dtype, device=device)

        self.logits = flat(kind)
        self.probabilities = None if plan.kernels else flat(wide)
        """The exponentials of the logits, and the gradient, of operations of torch."""
        self.narrow = None if kind == narrow else flat(narrow)
        """A product before it is added to the logits, and the gradient that is multiplied, in the inputs' type."""
        self.slope = flat(wide) if backward and plan.cap is not None and not plan.kernels else None
        """The slope of the soft-cap."""
        self.columns = [
            None if weight.dtype == x.dtype else rows(weight, x.dtype)
            for x, weight in zip(inputs, weights, strict=False)
        ]
        """The tile's rows of the weights, where those are in another type than the inputs."""
        self.sums = [
            rows(weight, wide) if need and weight.dtype != wide else None
            for weight, need in zip(weights, trained or [False] * len(weights), strict=True)
        ]
        """Gradients of the tile's rows of the weights, where a gradient itself is less precise than its sums."""
        self.product = None
        """A product of the backward pass before it is added to float32."""
        if backward and weights and narrow != wide and not plan.wide_sums:
            widest = max(weight.shape[1] for weight in weights)
            self.product = flat(narrow, max(tokens, entries) * widest)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        single = (self.logits, self.probabilities, self.narrow, self.slope, self.product)
        return sum(buffer.nbytes for buffer in (*single, *self.columns, *self.sums) if buffer is not None)


def shaped(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """The beginning of a flat buffer as a tensor of that shape."""
    return buffer[: math.prod(shape)].view(shape)


def tile_size(device: torch.device) -> TileSize:
    """The sizes of tiles on a device."""
    if device.type == "cpu":
        return TileSize(COLUMNS, TILE)
    return gpu_tile(device)


def fits(tokens: int, plan: TilePlan) -> bool:
    """Return True if the logits are one tile that is kept."""
    # `Running.add` leaves the tile relative to its largest logit, and the slope of a soft-cap needs the logit itself.
    # The kernels write the gradient in place of the logits, and the product costs less there than a second buffer.
    return tokens * plan.vocabulary <= KEEP and plan.cap is None and not plan.kernels


def tiles(tokens: int, plan: TilePlan) -> Iterator[tuple[slice, list[slice]]]:
    """The tiles, column by column: (vocabulary entries, the rows of each tile)."""
    height, width = plan.largest(tokens)
    # The vocabulary is the outer loop: the weights of a tile stay in the cache while all rows go by.
    rows = [slice(start, min(start + height, tokens)) for start in range(0, tokens, height)] if tokens else []
    for start in range(0, plan.vocabulary, width):
        yield slice(start, min(start + width, plan.vocabulary)), rows
