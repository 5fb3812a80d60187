"""What the kernels of attention have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values."""


@dataclass(frozen=True)
class Scoring:
    """How scores come from the products of queries and keys."""

    scale: float
    """Factor of the products."""
    softcap: float | None = None
    """scores = softcap x tanh(scale x products / softcap); None: scale x products"""
