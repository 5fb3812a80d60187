"""The clipped policy loss: one form of ratio, one form of clipping, one average."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.components import Loss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.losses import clipping
from rlvr.losses.clipping import Clip, Surrogate
from rlvr.losses.ratio import Ratio, log_ratio
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.registry import register


@register("loss", "clip")
@dataclass(frozen=True)
class ClippedPolicyLoss(Loss):
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / pi_proximal per token, and its relatives.

    PPO (Schulman et al. 2017, eq. 7) with GRPO's advantages (Shao et al. 2024, eq. 3) and DAPO's separate upper clip
    (Yu et al. 2025, eq. 8). Where rho is 1, the gradient is that of -A log pi.
    """

    clip_low: Scalar = 0.2
    """The ratio is not rewarded for falling below 1 - clip_low; 1: no lower bound. With clip tv or kl: the bound of the divergence
    by which a probability may fall."""
    clip_high: Scalar = 0.2
    """The ratio is not rewarded for rising above 1 + clip_high. With clip tv or kl: the bound of the divergence by which a
    probability may rise."""
    average: Average = "sequences"
    """tokens: every token weighs the same (DAPO); sequences: every response (GRPO); groups: every group, by its tokens (the prompt
    average of ScaleRL, Khatri et al. 2025); constant: divide by a fixed length."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens. 1 sums over the response."""
    ratio: Ratio = "token"
    """token: of each token; sequence: of the whole response, the product over its tokens; geometric: the geometric mean over
    the response (GSPO); geometric_token: that, with each token's own gradient (GSPO-token)."""
    clip: Clip = "hard"
    """hard: PPO's; soft: a sigmoid gate (SAPO); detach: clip the ratio as a constant weight of log pi (CISPO); tv, kl: mask
    tokens whose probability moved too far (DPPO); none."""
    cap: Scalar | None = None
    """With clip hard: the ratio's bound for negative advantages (dual clip's c, two-sided clipping's delta), above
    1 + clip_high. With tv and kl: the ratio's bound at every token."""
    soft_positive: Scalar = 1.0
    """Temperature of the soft gate for positive advantages: the larger, the narrower."""
    soft_negative: Scalar = 1.05
    """Temperature of the soft gate for the others."""
    bound: Scalar | None = None
    """Clamps each log-ratio to [-bound, bound] nats before anything else (StableReinforce's pre-clip, Zhang et al. 2025);
    20 keeps every ratio finite."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    zero_without_advantage = True

    def __post_init__(self) -> None:
        if self.cap is not None and self.clip not in ("hard", "tv", "kl"):
            raise ValueError(f"cap bounds the ratio of clip hard, tv and kl; clip {self.clip!r} has no use for it")
        if self.clip in ("tv", "kl") and self.ratio != "token":
            raise ValueError(
                f"clip {self.clip!r} masks single tokens, and ratio {self.ratio!r} is one number per response: set ratio to "
                "token, or clip to hard, soft, detach or none"
            )
        numbers = isinstance(self.cap, float) and isinstance(self.clip_high, float)
        if self.clip == "hard" and numbers and self.cap <= 1 + self.clip_high:  # type: ignore[operator]
            raise ValueError(f"cap is {self.cap}, and must be above 1 + clip_high = {1 + self.clip_high:g}")
        refuse_below("clip_low", self.clip_low, 0)
        if self.clip in ("hard", "detach"):
            refuse_above("clip_low", self.clip_low, 1)  # 1 - clip_low bounds a ratio, which is never negative
        refuse_below("clip_high", self.clip_high, 0)
        refuse_below("soft_positive", self.soft_positive, 0, above=True)
        refuse_below("soft_negative", self.soft_negative, 0, above=True)
        refuse_below("bound", self.bound, 0, above=True)
        refuse_below("cap", self.cap, 0, above=True)

    @property
    def per_response(self) -> bool:
        """Whether it needs one advantage per response: with one ratio for all tokens, only their mean has an effect."""
        return self.ratio in ("sequence", "geometric")

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        gap = log_ratio(tokens, self.ratio, _number(self.bound))
        found, detached = self._surrogate(gap, tokens), gap.detach().exp()
        metrics = {
            "ratio/mean": detached,
            "ratio/max": detached,
            "ratio/clipped_low": found.low.float(),
            "ratio/clipped_high": found.high.float(),
        }
        return LossTerm(-tokens.average(found.value, self.average, over), metrics)

    def _surrogate(self, gap: torch.Tensor, tokens: TokenBatch) -> Surrogate:
        low, high = float(self.clip_low), float(self.clip_high)
        advantage, logprobs = tokens.advantage, tokens.logprobs
        if self.clip == "hard":
            return clipping.hard(gap, advantage, 1 - low, 1 + high, _number(self.cap))
        if self.clip == "soft":
            positive, negative = float(self.soft_positive), float(self.soft_negative)
            return clipping.soft(gap, advantage, positive, negative)
        if self.clip == "detach":
            return clipping.detached(gap, logprobs, advantage, 1 - low, 1 + high)
        if self.clip == "none":
            return clipping.unclipped(gap, advantage)
        return clipping.within_divergence(gap, logprobs, advantage, self.clip, low, high, _number(self.cap))


def _number(value: Scalar | None) -> float | None:
    return None if value is None else float(value)
