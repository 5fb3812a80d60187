"""What keeps a policy-gradient step near the policy that it started from: forms of the clipped surrogate.

Each function takes the log-ratio [T] with gradient and the advantage [T], and gives the surrogate to be maximised, with
the tokens at which its lower and upper bound act. Invariant: at ratio 1 the gradient is A grad log pi, whatever the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Clip = Literal["hard", "soft", "detach", "none", "tv", "kl"]


@dataclass(frozen=True)
class Surrogate:
    """What is maximised at each token [T], and where a bound takes something away (bool [T])."""

    value: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def hard(gap: torch.Tensor, advantage: torch.Tensor, low: float, high: float, cap: float | None) -> Surrogate:
    """min(rho A, clip(rho, low, high) A) (PPO, Schulman et al. 2017, eq. 7); where A < 0, rho is at most `cap`.

    The cap is the constant c of dual-clip PPO (Ye et al. 2020, arXiv 1912.09729), and the delta of two-sided clipping.
    """
    ratio = gap.detach().exp()
    below, above = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
    bounded = ratio.clamp(low, high)
    binds = below | above | (advantage == 0)
    if cap is not None:
        over = (ratio > cap) & (advantage < 0)
        bounded, binds, above = torch.where(over, cap, bounded), binds | over, above | over
    # Where the clip binds there is no gradient, and an overflowing ratio must not make one of 0 x inf.
    return Surrogate(torch.where(binds, bounded, gap.masked_fill(binds, 0.0).exp()) * advantage, below, above)


def soft(gap: torch.Tensor, advantage: torch.Tensor, positive: float, negative: float) -> Surrogate:
    """4 / tau sigmoid(tau (rho - 1)) A (SAPO, arXiv 2511.20347), tau by the sign of the advantage.

    The bounds act, softly, where the gradient is less than half of what it is at ratio 1.
    """
    tau = torch.full_like(advantage, negative).masked_fill(advantage > 0, positive)
    # Beyond a ratio of e^30 the gate is flat in float32 as in float64.
    gate = torch.sigmoid(tau * (gap.clamp_max(30.0).exp() - 1))
    halved = (4 * gate * (1 - gate)).detach() < 0.5
    return Surrogate(4 / tau * gate * advantage, halved & (gap.detach() < 0), halved & (gap.detach() > 0))


def detached(gap: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> Surrogate:
    """sg[clip(rho, low, high)] A log pi (CISPO, MiniMax-M1 2025, arXiv 2506.13585): a clipped token still has a gradient."""
    ratio = gap.detach().exp()
    return Surrogate(ratio.clamp(low, high) * advantage * logprobs, ratio < low, ratio > high)


def within_divergence(
    gap: torch.Tensor,
    logprobs: torch.Tensor,
    advantage: torch.Tensor,
    by: Literal["tv", "kl"],
    low: float,
    high: float,
    cap: float | None,
) -> Surrogate:
    """M sg[min(rho, cap)] A log pi (DPPO, Qi et al. 2026, arXiv 2602.04879), with the binary approximations of divergence.

    M is 0 where the token's probability already moved, in the direction in which the advantage pushes it, by more than the
    bound: `high` for a rise, `low` for a fall; else 1. With p now and q before, tv is |p - q|, and kl is
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
    """
    now = logprobs.detach()
    before = now - gap.detach()
    p, q = now.exp(), before.exp()
    if by == "tv":
        moved = (p - q).abs()
    else:
        rest = torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        moved = q * (before - now) + (1 - q) * rest
    above = (advantage > 0) & (p > q) & (moved > high)
    below = (advantage <= 0) & (p < q) & (moved > low)
    ratio = gap.detach().exp()
    if cap is not None:
        ratio = ratio.clamp_max(cap)
    idle = above | below | (advantage == 0)
    return Surrogate(ratio.masked_fill(idle, 0.0) * advantage * logprobs, below, above)


def unclipped(gap: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
    """Rho A, the importance-weighted policy gradient."""
    idle = advantage == 0
    nowhere = torch.zeros_like(idle)
    return Surrogate(gap.masked_fill(idle, 0.0).exp() * advantage, nowhere, nowhere)
