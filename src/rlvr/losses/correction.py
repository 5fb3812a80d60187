"""Corrections for tokens that another distribution sampled: one weight per token of the policy loss.

The engine's log-probs may differ from the trainer's, by rounding or because its weights are older. With the ratio
r = pi_proximal / pi_behaviour of a token, the expectation under the behaviour policy of r f is that of f under the
proximal policy; the weights here are r with its variance bounded.

Invariants: weights are detached, at least 0, and 1 where the two policies agree; a weight of 0 takes a token out of the
gradient but not out of any denominator, which is counted before the first forward pass (N1), so a step in which much is
masked is a smaller step. No weight multiplies ratios over a sequence: with 100 tokens a gap of 0.01 each would be e.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlvr.components import Correction
from rlvr.losses.tokens import TokenBatch
from rlvr.registry import register

Level = Literal["token", "sequence"]


@register("correction", "truncate")
@dataclass(frozen=True)
class Truncate(Correction):
    """min(r, cap): truncated importance sampling (Espeholt et al. 2018, eq. 1; Yao et al. 2025 for engine mismatch)."""

    cap: float = 2.0
    """Largest weight."""
    level: Level = "token"
    """token: the ratio of each token; sequence: the geometric mean of its response's ratios for every token of it."""

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"cap is {self.cap}: below 1 it would change the weight of tokens without any gap")

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        # w = min(pi_proximal / pi_behaviour, cap), [T]: bounded from above only, since small ratios add no variance.
        return ratios(tokens, self.level).clamp_max(self.cap)


@register("correction", "mask")
@dataclass(frozen=True)
class Mask(Correction):
    """r within [low, high], else 0: IcePop (Ling team 2025, "Every step evolves", with the paper's band)."""

    low: float = 0.5
    """A ratio below this masks."""
    high: float = 5.0
    """A ratio above this masks."""
    level: Level = "token"
    """token: the ratio of each token; sequence: the geometric mean over its response."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(f"the band [{self.low}, {self.high}] must hold 1: else tokens without any gap are masked")

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        ratio = ratios(tokens, self.level)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


@register("correction", "reject")
@dataclass(frozen=True)
class Reject(Correction):
    """Responses whose divergence from the behaviour policy is over a bound weigh 0, the others min(r, cap) per token.

    The divergence is the mean over the response's trained tokens of r - 1 - log r, an estimate of
    KL(behaviour || proximal) that is never negative (k3 of rlvr.losses.kl), so opposite gaps do not cancel.
    """

    max_kl: float = 0.05
    """Nats per token beyond which a response is rejected."""
    cap: float = 2.0
    """Largest weight of a token that is not rejected."""

    def __post_init__(self) -> None:
        if self.max_kl <= 0 or self.cap < 1:
            raise ValueError(f"max_kl must be above 0 and cap at least 1, not {self.max_kl} and {self.cap}")

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        log_ratio = tokens.behaviour_log_ratio
        # bool [S]. The summand is r - 1 - log r with r = pi_proximal / pi_behaviour and tokens from the behaviour
        # policy: its expectation is KL(behaviour || proximal). expm1 keeps the digits that r - 1 loses near r = 1.
        kept = tokens.mean_by_sequence(torch.expm1(log_ratio) - log_ratio) <= self.max_kl
        return torch.where(kept[tokens.sequence], log_ratio.exp().clamp_max(self.cap), 0.0)


@register("correction", "mask_negatives")
@dataclass(frozen=True)
class MaskNegatives(Correction):
    """Punished responses that the policy has left behind weigh 0, the others min(r, cap) per token, or 1 without a cap.

    Off-policy sequence masking (DeepSeek-V3.2, 2025; checked against TRL 1.16): where the advantage is negative and the
    mean over the response of log pi_behaviour - log pi is over the bound, there is nothing to learn from pushing
    further. pi is the current policy, so drift since sampling and the engine's own gap both count.
    """

    max_kl: float = 0.05
    """Nats per token of a response beyond which its punished tokens are masked."""
    cap: float | None = 2.0
    """Largest weight of a token that is not masked; null: all weigh 1."""

    def __post_init__(self) -> None:
        if self.max_kl <= 0 or (self.cap is not None and self.cap < 1):
            raise ValueError(f"max_kl must be above 0 and cap at least 1, not {self.max_kl} and {self.cap}")

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        drift = tokens.behaviour_logprobs - tokens.logprobs.detach()
        # bool [T], the same at all tokens of a response. The mean is not clamped as the weights are: nothing is
        # exponentiated.
        far = (tokens.mean_by_sequence(drift) > self.max_kl)[tokens.sequence]
        if self.cap is None:
            weight = torch.ones_like(drift)
        else:
            weight = tokens.behaviour_log_ratio.exp().clamp_max(self.cap)
        return weight.masked_fill(far & (tokens.advantage < 0), 0.0)


def ratios(tokens: TokenBatch, level: Level = "token") -> torch.Tensor:
    """pi_proximal / pi_behaviour [T], per token, or its geometric mean over the token's response."""
    log_ratio = tokens.behaviour_log_ratio
    # exp of the mean log-ratio: a geometric mean, whose size does not grow with the length of the response.
    return (log_ratio if level == "token" else tokens.mean_by_sequence(log_ratio)[tokens.sequence]).exp()
