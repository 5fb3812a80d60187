"""Losses of the probability ratio beside `clip`: DRO penalises it, GMPO takes its geometric mean over a response, M2PO
bounds its second moment, VESPO weighs REINFORCE by a smooth function of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlvr.components import Loss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar, refuse_below
from rlvr.losses.averaged_loss import AveragedLoss
from rlvr.losses.clip import Surrogate
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch, log_ratio
from rlvr.registry import register


@register("loss", "dro")
@dataclass(frozen=True)
class QuadraticPenaltyLoss(AveragedLoss):
    """-(A log pi - beta / 2 (log pi - log pi_proximal)^2) per token.

    Direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107) as Kimi k1.5 uses it, token by token as in
    verl's loss_mode dro. At beta 0 it is `reinforce`.
    """

    beta: Scalar = 0.1
    """Weight of the penalty, at least 0."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    degenerate_on_policy = True

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T]. The gradient of the value is (A - beta log rho) grad log pi: that of REINFORCE where the policy has not
        # moved.
        log_ratio = tokens.logprobs - tokens.proximal_logprobs
        value = tokens.advantage * tokens.logprobs - 0.5 * float(self.beta) * log_ratio.square()
        ratio = log_ratio.detach().exp()
        return LossTerm(-tokens.average(value, self.average, over), {"ratio/mean": ratio, "ratio/max": ratio})


@register("loss", "gmpo")
@dataclass(frozen=True)
class GeometricMeanLoss(Loss):
    """-A exp(mean over the response of the clipped log-ratios), a mean over responses.

    Geometric-Mean Policy Optimization (Zhao et al. 2025, arXiv 2507.20673): log rho is clipped to [-clip_low,
    clip_high], on the side that the sign of the advantage pushes to. Without the clip it is GSPO without its. The
    advantage of a response is the mean over its tokens.
    """

    clip_low: Scalar = 0.4
    """A log-ratio below -clip_low is not rewarded for falling; the paper's (e^-0.4, e^0.4)."""
    clip_high: Scalar = 0.4
    """A log-ratio above clip_high is not rewarded for rising."""

    average: ClassVar[Average] = "sequences"
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    zero_without_advantage = True
    per_response = True

    def __post_init__(self) -> None:
        refuse_below("clip_low", self.clip_low, 0)
        refuse_below("clip_high", self.clip_high, 0)

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        low = float(self.clip_low)
        high = float(self.clip_high)
        # [T]
        log_ratio = tokens.logprobs - tokens.proximal_logprobs
        advantage = tokens.advantage
        sign = advantage.sign()
        # For A > 0 this is min(log rho, high), for A < 0 max(log rho, -low): the bound on the other side never acts, as
        # in PPO. For A = 0 it is 0, and so is the response's advantage.
        clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
        # [T], one number per response repeated at its tokens: the geometric mean exp(1 / |y| sum_t log rho_t).
        ratio = tokens.mean_by_sequence(clipped)[tokens.sequence].exp()
        value = tokens.mean_by_sequence(advantage)[tokens.sequence] * ratio
        # [T], for metrics: which tokens the clip acts on.
        plain = log_ratio.detach()
        surrogate = Surrogate(value, (plain < -low) & (advantage < 0), (plain > high) & (advantage > 0))
        return LossTerm(-tokens.average(value, "sequences", over), surrogate.metrics(ratio.detach()))


@register("loss", "m2po")
@dataclass(frozen=True)
class SecondMomentLoss(AveragedLoss):
    """-M rho A, M 0 at the fewest tokens whose leaving makes the mean of (log rho)^2 over the step at most the bound.

    Second-Moment Trust Policy Optimization (Zheng et al. 2025, arXiv 2510.01161), with the mask as AReaL has it: tokens
    of any advantage are left out, the largest log-ratios first. There is no other clip. A bound that no step reaches
    makes it `clip` with clip none.
    """

    moment: Scalar = 0.04
    """Bound of the mean squared log-ratio, nats squared, above 0."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    chooses_by = frozenset({Need("logprobs"), Need("logprobs", PROXIMAL)})

    def choose(self, tokens: TokenBatch) -> torch.Tensor:
        """1 where the token is left out, else 0, [T]."""
        # float64 [T], all tokens of the optimizer step: M_2 = mean of (log rho)^2 over those that are kept.
        squares = log_ratio(tokens).detach().square()
        ordered, order = squares.sort()
        # Means over the k smallest squares. They rise with k, since every further square is at least as large as those
        # before, so the number of means within the bound is the most tokens that can be kept.
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=squares.device)
        kept = int((means <= float(self.moment)).sum())
        return torch.zeros_like(squares).index_fill(0, order[kept:], 1.0)

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        assert tokens.chosen is not None
        out = tokens.chosen > 0
        log_ratios = log_ratio(tokens)
        # Both factors are filled: an overflowing ratio times an advantage of 0 would be NaN.
        value = log_ratios.masked_fill(out, 0.0).exp() * tokens.advantage.masked_fill(out, 0.0)
        ratio = log_ratios.detach().exp()
        metrics = {"ratio/mean": ratio, "ratio/max": ratio, "tokens/chosen": tokens.chosen}
        return LossTerm(-tokens.average(value, self.average, over), metrics)


# Both from get_gamma_weights of TRL 1.16 (trl/trainer/grpo_trainer.py), as are the clamps below.
LEAST = math.log(1e-8)
MOST = 20.0
"""The log of a response's ratio is kept in this band."""


@register("loss", "vespo")
@dataclass(frozen=True)
class GammaWeightedLoss(AveragedLoss):
    """-phi(w) A log pi, phi(w) = w^k exp(lambda (1 - w)) a constant, w the product of the response's ratios.

    VESPO, variational sequence-level soft policy optimization (Shen et al. 2026, arXiv 2602.10693; checked against TRL
    1.16's loss_type vespo). phi is 1 at w = 1 and falls to 0 on both sides; k and lambda go by the sign of the
    advantage. A correction is taken into w, where it belongs, and not multiplied on top.
    """

    power_positive: Scalar = 2.0
    """k where the advantage is not negative."""
    decay_positive: Scalar = 3.0
    """lambda where the advantage is not negative."""
    power_negative: Scalar = 3.0
    """k where the advantage is negative."""
    decay_negative: Scalar = 2.0
    """lambda where the advantage is negative."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    zero_without_advantage = True

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T]; no gradient goes through the weight.
        log_ratios = log_ratio(tokens, bound=20.0).detach()
        if tokens.importance is not None:
            # log w = log pi / pi_proximal + log pi_proximal / pi_behaviour; a masked token has weight 0, whose log is
            # -inf.
            log_ratios = log_ratios + tokens.importance.log().clamp(LEAST, MOST)
        # [T], one number per response.
        log_w = tokens.sum_by_sequence(log_ratios)[tokens.sequence].clamp(LEAST, MOST)
        w = log_w.exp()
        # bool [T]
        up = tokens.advantage >= 0
        k = torch.full_like(w, float(self.power_negative)).masked_fill(up, float(self.power_positive))
        decay = torch.full_like(w, float(self.decay_negative)).masked_fill(up, float(self.decay_positive))
        # log phi = k log w + lambda (1 - w), which is 0 at w = 1 and largest at w = k / lambda.
        phi = (decay.clamp_min(1e-4) * (1 - w) + k * log_w).exp()
        # `average` would multiply by the correction once more.
        plain = dataclasses.replace(tokens, importance=None)
        metrics = {"ratio/mean": w, "ratio/max": w}
        return LossTerm(-plain.average(phi * tokens.advantage * tokens.logprobs, self.average, over), metrics)
