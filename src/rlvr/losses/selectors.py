"""Token selectors: which tokens of an optimizer step the policy loss learns from.

A selector is shown all tokens of the step, with the statistics that it declares, before the step is cut into
micro-batches. What it gives multiplies the loss of each token; it never counts in a denominator, so a step in which
much is left out is a smaller step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.components import TokenSelector
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.losses.tokens import TokenBatch
from rlvr.registry import register


@register("token_selector", "top_entropy")
@dataclass(frozen=True)
class TopEntropy(TokenSelector):
    """The tokens at which the policy was least sure: entropy at or above the quantile 1 - share of the step's tokens.

    Wang et al. 2025, "Beyond the 80/20 rule" (arXiv 2506.01939): the fifth of the tokens with the highest entropy
    carries the learning. With share 1 every token is kept.
    """

    share: Scalar = 0.2
    """Share of the tokens that are learned from, above 0 and at most 1."""

    needs = frozenset({Need("entropy")})

    def __post_init__(self) -> None:
        refuse_below("share", self.share, 0, above=True)
        refuse_above("share", self.share, 1)

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        # float64 [T], over the whole optimizer step.
        entropy = tokens.entropy
        # torch.quantile takes at most 2^24 numbers; the same linear interpolation, by sorting
        place = (1 - float(self.share)) * (len(entropy) - 1)
        ordered = entropy.sort().values
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        bound = torch.lerp(ordered[low], ordered[high], place - low)
        # Tokens at the bound are kept, so with many equal entropies more than `share` of them are.
        return (entropy >= bound).to(entropy.dtype)
