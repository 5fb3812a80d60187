"""What it costs to compute rollouts as padded rows, packed rows, and packed rows with shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlvr.policy.attention import Spans
from rlvr.policy.model import LayerSizes, Policy


@dataclass(frozen=True)
class AttentionSpeed:
    """Speed of attention on a kind of device, relative to that of the layers' matrix products."""

    pair: float
    """Time of a FLOP of attention over that of a FLOP of a matrix product."""
    call: float
    """FLOPs of matrix products that take as long as what an attention call costs whatever its size: its start, and
    the gathers and the merging around it."""


# Orders of magnitude: a larger `call` favours fewer levels and padded rows, a larger `pair` favours sharing prefixes.
# Measured by `scripts/gpu/stages/attention.py`, stage `constants`; not yet on these GPUs, so the GPUs' are arithmetic
# from published rates of training, in TFLOP/s of bfloat16: A100 190 of flash attention 2 (Dao 2023, arXiv:2307.08691,
# figure 5, causal, width 128) against 250 of matrix products (80 % of its peak of 312); H100 and H200 350 (Shah et al.
# 2024, arXiv:2407.08608, section 1: 35 % of 989) against 650. 50 us for a call and its merging.
SPEEDS = {
    "cpu": AttentionSpeed(pair=1.0, call=5e6),
    "A100": AttentionSpeed(pair=1.3, call=1.3e10),
    "H100": AttentionSpeed(pair=1.9, call=3.3e10),
    "H200": AttentionSpeed(pair=1.9, call=3.3e10),
}
"""By kind of device, for GPUs by a part of the name that CUDA gives."""
ELSEWHERE = AttentionSpeed(pair=1.5, call=2e10)
"""Of every other device."""


def speed_of(device: torch.device) -> AttentionSpeed:
    """The speed of attention on a device."""
    kind = device.type
    if kind == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        kind = next((known for known in SPEEDS if known in name), kind)
    return SPEEDS.get(kind, ELSEWHERE)


@dataclass(frozen=True)
class Cost:
    """The cost of a forward pass in tokens: the time that the layers take for one token without attention."""

    pair: float
    """A query and a key that it sees, in all layers."""
    call: float
    """An attention call, in all layers."""
    in_blocks: bool
    """True: packed attention pads stretches to blocks, each a call. False: it takes stretches of any length."""

    @classmethod
    def of(cls, policy: Policy) -> Cost:
        """Of a policy on its device."""
        return cls.of_layers(policy.layers, speed_of(policy.device), policy.device.type == "cpu")

    @classmethod
    def of_layers(cls, layers: LayerSizes, speed: AttentionSpeed, in_blocks: bool) -> Cost:
        """From the sizes of a model's layers: 2 FLOPs for each weight of a layer and token, 4 for each pair and
        channel."""
        flops = 2 * layers.weights
        # In tokens: FLOPs over those of the layers for one token. A pair is a multiplication and an addition in each of
        # q k^T and the product with v, for each channel.
        pair = 4 * layers.count * layers.channels * speed.pair / flops
        return cls(pair, layers.count * speed.call / flops, in_blocks)

    def padded(self, lengths: np.ndarray) -> float:
        """Rollouts of these lengths as padded rows: one causal call over [R, longest]."""
        longest = int(lengths.max())
        return len(lengths) * (longest + self.pair * longest**2 / 2) + self.call

    def packed(self, spans: Spans) -> float:
        """One row of these spans, in layers with full attention."""
        pairs = 0.0
        calls = 0
        for part in spans.segments(None):
            if self.in_blocks:
                # A causal block computes about half of its square.
                pairs += part.padded_pairs / (2 if part.causal else 1)
                calls += len(part.members)
            else:
                pairs += part.pairs
                calls += 1
        return float(spans.length.sum()) + self.pair * pairs + self.call * calls

    def alone(self, lengths: np.ndarray) -> np.ndarray:
        """Each rollout for itself: what to balance ranks by."""
        return lengths + self.pair * lengths**2 / 2
