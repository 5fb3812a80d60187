"""The base of losses of tokens whose average is an option."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.components import Loss
from rlvr.losses.tokens import Average


@dataclass(frozen=True, kw_only=True)
class AveragedLoss(Loss):
    """A loss of tokens that is averaged as the configuration says."""

    average: Average = "tokens"
    """tokens: every token weighs the same; sequences: every response; groups: every group; constant: divide by a fixed
    length."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens."""
