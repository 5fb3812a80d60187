"""Penalties on the divergence from the reference: Schulman's estimators of KL(pi || reference) from samples of pi.

With d = log reference - log pi (Schulman 2020, http://joschu.net/blog/kl-approx.html):
k1 = -d, unbiased, and as a loss its expected gradient is zero on-policy (use it to look, not to train);
k2 = d^2 / 2, biased, its gradient is that of the KL on-policy; k3 = exp(d) - 1 - d, unbiased and never negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.needs import REFERENCE, Need
from rlvr.registry import register
from rlvr.schedules import Scalar

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@register("kl", "k1")
def k1(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Log pi - log reference, per token [T]."""
    return logprobs - reference


@register("kl", "k2")
def k2(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio, per token [T]."""
    return 0.5 * (logprobs - reference).square()


@register("kl", "k3")
def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Exp(d) - 1 - d with d = log reference - log pi, per token [T]; what GRPO uses (Shao et al. 2024, eq. 4)."""
    d = reference - logprobs
    return torch.expm1(d) - d


@dataclass(frozen=True)
class KLPenalty:
    """The estimator averaged like the policy loss."""

    estimator: Estimator
    average: Average
    coef: Scalar = 0.0

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", REFERENCE)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        divergence = self.estimator(tokens.logprobs, tokens.reference_logprobs)
        return LossTerm(tokens.average(divergence, self.average, over), {"kl/ref": divergence.detach()})
