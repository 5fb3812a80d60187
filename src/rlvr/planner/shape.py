"""The sizes of a model that a memory plan is made from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, independent of how it is trained: in bytes where nothing else is stated."""

    parameters: int
    """All weights (a number)."""
    trained: int
    """Weights that train (a number)."""
    frozen: float
    """The weights that do not train, in the type computed in, or in 4 bits."""
    largest: int
    """Weights of the largest parameter (a number)."""
    layers: int
    """Decoder layers (a number)."""
    hidden: int
    vocabulary: int
    context: int
    kept: float
    """Kept by the decoder for the backward pass, for each token, without gradient checkpointing and in float32."""
    scores: float
    """Kept for the backward pass, for each pair of a token and a position that it may look at: attention scores, which eager
    attention keeps and fused kernels do not."""
    keys_and_values: int
    """For each token in the cache."""

    @property
    def weights(self) -> int:
        """Weights as they are loaded: those that train in float32."""
        return round(4 * self.trained + self.frozen)
