"""The clipped policy loss: token-level ratio, asymmetric clipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.needs import PROXIMAL, Need
from rlvr.registry import register
from rlvr.schedules import Scalar


@register("loss", "clip")
@dataclass(frozen=True)
class ClippedPolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / pi_proximal per token.

    PPO (Schulman et al. 2017, eq. 7) with GRPO's advantages (Shao et al. 2024, eq. 3) and DAPO's separate upper clip
    (Yu et al. 2025, eq. 8). Where rho is 1, the gradient is that of -A log pi.
    """

    clip_low: Scalar = 0.2
    """The ratio is not rewarded for falling below 1 - clip_low."""
    clip_high: Scalar = 0.2
    """The ratio is not rewarded for rising above 1 + clip_high."""
    average: Average = "sequences"
    """tokens: every token weighs the same (DAPO); sequences: every response (GRPO); constant: divide by a fixed length."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    zero_without_advantage = True

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        low, high = 1 - float(self.clip_low), 1 + float(self.clip_high)  # type: ignore[arg-type]
        gap, advantage = tokens.logprobs - tokens.proximal_logprobs, tokens.advantage
        detached = gap.detach().exp()
        binds = ((detached < low) & (advantage < 0)) | ((detached > high) & (advantage > 0)) | (advantage == 0)
        # Where the clip binds there is no gradient, and an overflowing ratio must not make one of 0 x inf.
        value = torch.where(binds, detached.clamp(low, high), gap.masked_fill(binds, 0.0).exp()) * advantage
        metrics = {
            "ratio/mean": detached,
            "ratio/max": detached,
            "ratio/clipped_low": ((detached < low) & (tokens.advantage < 0)).float(),
            "ratio/clipped_high": ((detached > high) & (tokens.advantage > 0)).float(),
        }
        return LossTerm(-tokens.average(value, self.average, over), metrics)
