"""TOPR: REINFORCE on stale samples, with an importance weight that depends on the sign of the advantage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.components import Loss
from rlvr.core.needs import BEHAVIOUR, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.registry import register


@register("loss", "topr")
@dataclass(frozen=True)
class TaperedLoss(Loss):
    """-clip(rho, low, high) A log pi, rho = pi / mu of the whole response as a constant, the clip by the advantage's
    sign.

    Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286): positive responses weigh 1, like supervised
    learning; negative ones the ratio truncated to [0, 1], so that they stop pushing once they have become unlikely. mu
    is the policy that sampled, so log-probs must be known and no correction is applied on top. All clips at [1, 1] give
    `reinforce`.
    """

    positive_low: Scalar = 1.0
    """Least weight where the advantage is not negative."""
    positive_high: Scalar = 1.0
    """Largest weight where the advantage is not negative."""
    negative_low: Scalar = 0.0
    """Least weight where the advantage is negative."""
    negative_high: Scalar = 1.0
    """Largest weight where the advantage is negative."""
    average: Average = "constant"
    """constant: divide the sum over a response by a fixed length (the paper's equation, up to a factor); sequences: by
    the response's own length (the paper's experiments); tokens."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", BEHAVIOUR)})
    zero_without_advantage = True

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T]; detached, since the weight is a constant and the gradient is that of log pi alone.
        log_ratio = tokens.logprobs.detach() - tokens.behaviour_logprobs
        # [T], one number per response. exp(30) = 1.1e13 is finite in float32, and far above any bound that makes sense.
        ratio = tokens.sum_by_sequence(log_ratio)[tokens.sequence].clamp_max(30.0).exp()
        bounds = [float(v) for v in (self.positive_low, self.positive_high, self.negative_low, self.negative_high)]
        weight = torch.where(tokens.advantage >= 0, ratio.clamp(*bounds[:2]), ratio.clamp(*bounds[2:]))
        metrics = {"ratio/mean": ratio, "ratio/max": ratio}
        return LossTerm(-tokens.average(weight * tokens.advantage * tokens.logprobs, self.average, over), metrics)
