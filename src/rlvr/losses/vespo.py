"""VESPO: REINFORCE weighted by a smooth function of the ratio of the whole response."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.averaged_loss import AveragedLoss
from rlvr.losses.tokens import Denominators, LossTerm, TokenBatch, log_ratio
from rlvr.registry import register

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
