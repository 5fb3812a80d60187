"""Tiles of the logits [T, V] of a head: how the matrix is cut, and the logits of one tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

COLUMNS = 2048
"""Vocabulary entries of a tile."""
TILE = 1 << 20
"""Logits of a tile: 4 MiB in float32, which stay in a CPU's cache."""
GPU_TILE = 1 << 22
"""The same elsewhere, where a tile has to keep the device busy."""
KEEP = 1 << 22
"""Up to so many logits are one tile and are kept for the backward pass: 16 MiB in float32."""
PAIRS, ENTROPY, LSE, MEAN, MAXIMUM, SQUARES, TOP = (
    "pair_logprobs",
    "entropy",
    "logsumexp",
    "mean_logit",
    "max_logit",
    "sum_squared_probs",
    "top_k",
)
NAMES = (PAIRS, ENTROPY, LSE, MEAN, MAXIMUM, SQUARES, TOP)
"""In the order in which the autograd function returns them."""


@dataclass(frozen=True)
class Plan:
    """What does not change between the forward and the backward pass."""

    asked: dict[str, bool]
    top_k: int
    terms: int
    scale: float
    cap: float | None
    vocabulary: int
    common_temperature: float | None = None
    """That of all tokens, where it is known without reading it from the device."""

    @property
    def last_factor(self) -> float:
        """What a tile is multiplied by last, before it is divided by the temperatures."""
        return self.scale if self.cap is None else self.cap

    @property
    def top(self) -> int:
        """How many of the largest logits are followed."""
        return max(self.top_k if TOP in self.asked else 0, int(self.asked.get(MAXIMUM, False)))

    @property
    def outputs(self) -> list[bool]:
        """Which of NAMES have a gradient."""
        return [self.asked.get(name, False) for name in NAMES]


def fits(tokens: int, plan: Plan) -> bool:
    """Whether the logits are one tile that is kept."""
    return tokens * plan.vocabulary <= KEEP and plan.cap is None


def tiles(tokens: int, plan: Plan, device: torch.device) -> Iterator[tuple[slice, list[slice]]]:
    """The tiles, column by column: (vocabulary entries, the rows of each tile)."""
    if fits(tokens, plan):
        yield slice(0, plan.vocabulary), [slice(0, tokens)]
        return
    width = min(plan.vocabulary, COLUMNS)
    height = max(1, (TILE if device.type == "cpu" else GPU_TILE) // width)
    rows = [slice(start, min(start + height, tokens)) for start in range(0, tokens, height)]
    for start in range(0, plan.vocabulary, width):
        yield slice(start, min(start + width, plan.vocabulary)), rows


class Logits:
    """Tiles of logits, tempered and capped, in one buffer that is used again and again."""

    def __init__(
        self,
        plan: Plan,
        temperature: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
        weights: tuple[torch.Tensor, ...],
    ) -> None:
        self.plan, self.inputs, self.weights = plan, inputs, weights
        self.dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        self.factor = plan.last_factor / temperature.to(self.dtype)[:, None]
        """[T, 1]: what a tile is multiplied by last."""
        self.unchanged = plan.common_temperature == plan.last_factor
        """Whether that is known to be 1; where it is not known, a product with 1 has the same bits."""
        self.buffer = inputs[0].new_empty(0, dtype=self.dtype)

    def columns(self, part: slice) -> list[torch.Tensor]:
        """The rows of the weights for some vocabulary entries, in the dtype of the inputs."""
        return [weight[part].to(x.dtype) for x, weight in zip(self.inputs, self.weights, strict=False)]

    def tile(self, rows: slice, part: slice, weights: list[torch.Tensor]) -> torch.Tensor:
        """[t, v] logits, in the buffer."""
        shape = (rows.stop - rows.start, part.stop - part.start)
        if self.buffer.numel() < shape[0] * shape[1]:
            self.buffer = self.buffer.new_empty(shape[0] * shape[1])
        z = self.buffer[: shape[0] * shape[1]].view(shape)
        if not weights:
            z.copy_(self.inputs[0][rows, part])
        for i, (x, weight) in enumerate(zip(self.inputs, weights, strict=False)):
            if x.dtype != z.dtype:
                product = x[rows] @ weight.t()
                z.copy_(product) if i == 0 else z.add_(product)
            elif i == 0:
                torch.mm(x[rows], weight.t(), out=z)
            else:
                z.addmm_(x[rows], weight.t())
        if self.plan.cap is not None:
            z.mul_(self.plan.scale / self.plan.cap).tanh_()
        return z if self.unchanged else z.mul_(self.factor[rows])
