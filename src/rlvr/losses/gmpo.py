"""GMPO: the geometric mean of a response's ratios, each clipped in log space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlvr.components import Loss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar, refuse_below
from rlvr.losses.clip import Surrogate
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.registry import register


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
