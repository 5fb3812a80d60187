"""What a piece may ask of a forward pass, and of which model. Pieces declare it; the learner computes only that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CURRENT = "current"
"""The policy as it is now."""
PROXIMAL = "proximal"
"""The policy that the ratio is taken to: the current one, detached, on a batch's first optimizer step; on later steps the
one that sampled, or, where the objective is decoupled, the one that the update began with."""
REFERENCE = "reference"
"""The snapshot of the policy at the start of the stage."""


@dataclass(frozen=True)
class Need:
    """One statistic at the trained tokens.

    `statistic` is logprobs (of the tokens themselves) or entropy; `model` is current, proximal, reference or a named model;
    `grad` says whether the piece differentiates it.
    """

    statistic: Literal["logprobs", "entropy"]
    model: str = CURRENT
    grad: bool = False
