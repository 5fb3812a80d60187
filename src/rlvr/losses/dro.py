"""DRO: the policy gradient with a quadratic penalty on the log-ratio."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.averaged_loss import AveragedLoss
from rlvr.losses.tokens import Denominators, LossTerm, TokenBatch
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
