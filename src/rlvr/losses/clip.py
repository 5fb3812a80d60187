"""The clipped policy loss: one form of ratio, one form of clipping, one average.

The forms of clipping keep a policy-gradient step near the policy that it started from. Each is a function of the
log-ratio [T] with gradient and the advantage [T], and gives the surrogate to be maximised, with the tokens at which its
lower and upper bound act. Invariant: at ratio 1 the gradient is A grad log pi, whatever the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rlvr.components import Loss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.losses.tokens import Average, Denominators, LossTerm, Ratio, TokenBatch, log_ratio
from rlvr.registry import register

Clip = Literal["hard", "soft", "detach", "none", "tv", "kl"]


@dataclass(frozen=True)
class Surrogate:
    """The objective at each token [T], and the places where a bound takes something away (bool [T])."""

    value: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def metrics(self, ratio: torch.Tensor) -> dict[str, torch.Tensor]:
        """The ratios [T], detached, and where the bounds act."""
        clipped = {"ratio/clipped_low": self.low.float(), "ratio/clipped_high": self.high.float()}
        return {"ratio/mean": ratio, "ratio/max": ratio, **clipped}


@register("loss", "clip")
@dataclass(frozen=True)
class ClippedPolicyLoss(Loss):
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = pi / pi_proximal per token, and its relatives.

    PPO (Schulman et al. 2017, eq. 7) with GRPO's advantages (Shao et al. 2024, eq. 3) and DAPO's separate upper clip
    (Yu et al. 2025, eq. 8). Where rho is 1, the gradient is that of -A log pi.
    """

    clip_low: Scalar = 0.2
    """The ratio is not rewarded for falling below 1 - clip_low; 1: no lower bound. With clip tv or kl: the bound of the
    divergence by which a probability may fall."""
    clip_high: Scalar = 0.2
    """The ratio is not rewarded for rising above 1 + clip_high. With clip tv or kl: the bound of the divergence by
    which a probability may rise."""
    average: Average = "sequences"
    """tokens: every token weighs the same (DAPO); sequences: every response (GRPO); groups: every group, by its tokens
    (the prompt average of ScaleRL, Khatri et al. 2025); constant: divide by a fixed length."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens. 1 sums over the response."""
    ratio: Ratio = "token"
    """token: of each token; sequence: of the whole response, the product over its tokens; geometric: the geometric mean
    over the response (GSPO); geometric_token: that, with each token's own gradient (GSPO-token)."""
    clip: Clip = "hard"
    """hard: PPO's; soft: a sigmoid gate (SAPO); detach: clip the ratio as a constant weight of log pi (CISPO); tv, kl:
    mask tokens whose probability moved too far (DPPO); none."""
    cap: Scalar | None = None
    """With clip hard: the ratio's bound for negative advantages (dual clip's c, two-sided clipping's delta), above
    1 + clip_high. With tv and kl: the ratio's bound at every token."""
    soft_positive: Scalar = 1.0
    """Temperature of the soft gate for positive advantages: the larger, the narrower."""
    soft_negative: Scalar = 1.05
    """Temperature of the soft gate for the others."""
    bound: Scalar | None = None
    """Clamps each log-ratio to [-bound, bound] nats before anything else (StableReinforce's pre-clip, Zhang et al.
    2025); 20 keeps every ratio finite."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    zero_without_advantage = True

    def __post_init__(self) -> None:
        if self.cap is not None and self.clip not in ("hard", "tv", "kl"):
            raise ValueError(f"cap bounds the ratio of clip hard, tv and kl; clip {self.clip!r} has no use for it")
        if self.clip in ("tv", "kl") and self.ratio != "token":
            raise ValueError(
                f"clip {self.clip!r} masks single tokens, and ratio {self.ratio!r} is one number per response: set "
                "ratio to token, or clip to hard, soft, detach or none"
            )
        # A schedule has no value before the run, so only two plain numbers can be compared here.
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
        """Return True if it needs one advantage per response: with one ratio for all tokens, only their mean has an
        effect."""
        return self.ratio in ("sequence", "geometric")

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T] log rho, with gradient; one number per response repeated at its tokens where the ratio is of the response.
        log_ratios = log_ratio(tokens, self.ratio, _number(self.bound))
        surrogate = self._surrogate(log_ratios, tokens)
        # [T], for metrics alone: the gradient goes through the surrogate.
        metrics = surrogate.metrics(log_ratios.detach().exp())
        # The surrogate is maximised and the learner minimises.
        return LossTerm(-tokens.average(surrogate.value, self.average, over), metrics)

    def _surrogate(self, log_ratio: torch.Tensor, tokens: TokenBatch) -> Surrogate:
        low = float(self.clip_low)
        high = float(self.clip_high)
        advantage = tokens.advantage
        logprobs = tokens.logprobs
        if self.clip == "hard":
            return hard(log_ratio, advantage, 1 - low, 1 + high, _number(self.cap))
        if self.clip == "soft":
            positive = float(self.soft_positive)
            negative = float(self.soft_negative)
            return soft(log_ratio, advantage, positive, negative)
        if self.clip == "detach":
            return detached(log_ratio, logprobs, advantage, 1 - low, 1 + high)
        if self.clip == "none":
            return unclipped(log_ratio, advantage)
        return within_divergence(log_ratio, logprobs, advantage, self.clip, low, high, _number(self.cap))


def _number(value: Scalar | None) -> float | None:
    return None if value is None else float(value)


def hard(log_ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, cap: float | None) -> Surrogate:
    """min(rho A, clip(rho, low, high) A) (PPO, Schulman et al. 2017, eq. 7); where A < 0, rho is at most `cap`.

    The cap is the constant c of dual-clip PPO (Ye et al. 2020, arXiv 1912.09729), and the delta of two-sided clipping.
    """
    ratio = log_ratio.detach().exp()
    # min(rho A, clip(rho) A) is the clipped product where rho > high and A > 0, and where rho < low and A < 0.
    # Elsewhere it is rho A, with its gradient: a move against the advantage is always taken back.
    below = (ratio < low) & (advantage < 0)
    above = (ratio > high) & (advantage > 0)
    bounded = ratio.clamp(low, high)
    # With A = 0 value and gradient are 0 either way; bound, an overflowing ratio cannot make 0 x inf of them.
    binds = below | above | (advantage == 0)
    if cap is not None:
        # For A < 0 and rho > high the minimum is rho A, which has no lower bound without the cap.
        over = (ratio > cap) & (advantage < 0)
        bounded = torch.where(over, cap, bounded)
        binds = binds | over
        above = above | over
    # Where the clip binds there is no gradient, and an overflowing ratio must not make one of 0 x inf.
    return Surrogate(torch.where(binds, bounded, log_ratio.masked_fill(binds, 0.0).exp()) * advantage, below, above)


def soft(log_ratio: torch.Tensor, advantage: torch.Tensor, positive: float, negative: float) -> Surrogate:
    """4 / tau sigmoid(tau (rho - 1)) A (SAPO, arXiv 2511.20347), tau by the sign of the advantage.

    The bounds act, softly, where the gradient is less than half of what it is at ratio 1.
    """
    # [T]; tokens of A = 0 take the temperature of negative ones, which changes nothing.
    tau = torch.full_like(advantage, negative).masked_fill(advantage > 0, positive)
    # Beyond a ratio of e^30 the gate is flat in float32 as in float64.
    gate = torch.sigmoid(tau * (log_ratio.clamp_max(30.0).exp() - 1))
    # d/d rho of 4 / tau sigmoid(tau (rho - 1)) is 4 g (1 - g) with g the gate: 1 at rho = 1, where g is 1/2, and less
    # on both sides. One half is a choice of the metric; the loss has no such bound.
    halved = (4 * gate * (1 - gate)).detach() < 0.5
    return Surrogate(4 / tau * gate * advantage, halved & (log_ratio.detach() < 0), halved & (log_ratio.detach() > 0))


def detached(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> Surrogate:
    """sg[clip(rho, low, high)] A log pi (CISPO, MiniMax-M1 2025, arXiv 2506.13585): a clipped token still has a
    gradient."""
    ratio = log_ratio.detach().exp()
    # The weight is clipped whatever the sign of the advantage, and is counted so.
    return Surrogate(ratio.clamp(low, high) * advantage * logprobs, ratio < low, ratio > high)


def within_divergence(
    log_ratio: torch.Tensor,
    logprobs: torch.Tensor,
    advantage: torch.Tensor,
    by: Literal["tv", "kl"],
    low: float,
    high: float,
    cap: float | None,
) -> Surrogate:
    """M sg[min(rho, cap)] A log pi (DPPO, Qi et al. 2026, arXiv 2602.04879), with the binary approximations of
    divergence.

    M is 0 where the token's probability already moved, in the direction in which the advantage pushes it, by more than
    the bound: `high` for a rise, `low` for a fall; else 1. With p now and q before, tv is |p - q|, and kl is q log(q /
    p) + (1 - q) log((1 - q) / (1 - p)).
    """
    now = logprobs.detach()
    before = now - log_ratio.detach()
    # [T] probabilities of the sampled token: p under the current weights, q under the proximal ones.
    p = now.exp()
    q = before.exp()
    if by == "tv":
        moved = (p - q).abs()
    else:
        # 1e-8 keeps the quotient finite where a probability is 1 in float32. It is arbitrary: it moves the divergence
        # only of tokens whose complement is as small.
        rest = torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        moved = q * (before - now) + (1 - q) * rest
    # Only a move in the direction of the push is masked, so that a token which moved the other way can come back.
    above = (advantage > 0) & (p > q) & (moved > high)
    below = (advantage <= 0) & (p < q) & (moved > low)
    ratio = log_ratio.detach().exp()
    if cap is not None:
        ratio = ratio.clamp_max(cap)
    # A product with 0 would be NaN where the ratio overflows.
    idle = above | below | (advantage == 0)
    return Surrogate(ratio.masked_fill(idle, 0.0) * advantage * logprobs, below, above)


def unclipped(log_ratio: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
    """Rho A, the importance-weighted policy gradient."""
    idle = advantage == 0
    # bool [T]: no bound ever acts.
    nowhere = torch.zeros_like(idle)
    return Surrogate(log_ratio.masked_fill(idle, 0.0).exp() * advantage, nowhere, nowhere)
