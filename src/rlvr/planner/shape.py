"""The sizes of a model that a memory plan is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlvr.planner.decoder_passes import DecoderSettings

MemoryParts = dict[str, float]
"""Bytes by the name of the part that takes them."""


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
    largest_module: int
    """Weights of all parameters of the module that has most itself: of experts two tensors (a number)."""
    layers: int
    """Decoder layers (a number)."""
    hidden: int
    vocabulary: int
    context: int
    decoder: DecoderSettings
    """Measures what passes through the layers take."""
    head_trained: int
    """Weights of the LM head, if it trains (a number)."""
    tied: bool
    """True if the LM head shares its weight with the token embedding."""
    scores: float
    """Kept for the backward pass, for each pair of a token and a position that it may look at: attention scores, which
    eager attention keeps and fused kernels do not."""
    queries: int
    """Width of the queries of a layer (a number)."""
    keys: int
    """Width of the keys of a layer (a number)."""
    keys_and_values: int
    """For each token in the cache, if every layer keeps all tokens."""
    linear: int = 0
    """Weights of linear layers and experts without the LM head (a number): those that vLLM quantises."""
    window: int = 0
    """Tokens that a layer with a sliding window sees; 0: no layer has one."""
    windowed: int = 0
    """Layers with a sliding window (a number)."""
    packs: bool = True
    """False if its kinds of layers rule out packed rows."""
    one_rope_up_to: float = math.inf
    """Tokens of the longest row that is packed (`rlvr.policy.layer_sizes.LayerSizes`)."""
    masked_beyond: float = math.inf
    """Padded rows of more tokens have a tensor with queries along one dimension and keys along another; inf: none
    have."""
    capped: bool = False
    """True if the logits have a soft-cap."""
    cpu_scores: float = 0.0
    """The same as `scores` on a CPU alone, by sdpa of values that are not as wide as keys (latent attention)."""

    @property
    def weights(self) -> int:
        """Weights as they are loaded: those that train in float32."""
        return round(4 * self.trained + self.frozen)
