"""Penalties on the divergence from the reference: estimators of KL(pi || reference) from samples of pi.

With d = log reference - log pi (Schulman 2020, http://joschu.net/blog/kl-approx.html): k1 = -d, unbiased, and as a loss
its expected gradient is zero on-policy (use it to look, or in the reward, not to train); k2 = d^2 / 2, biased, its
gradient is that of the KL on-policy; k3 = exp(d) - 1 - d, unbiased and never negative; abs = |d|. Which estimator is
differentiated may differ from which is reported (Liu et al. 2025, "Rethinking KL regularization in RLHF", arXiv
2510.01555): value of one, gradient of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlvr.components import Loss
from rlvr.core.needs import PROXIMAL, REFERENCE, Need
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.registry import register

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
    # expm1(d) is exp(d) - 1 without the cancellation near d = 0, where the policy has hardly moved.
    d = reference - logprobs
    return torch.expm1(d) - d


@register("kl", "abs")
def absolute(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|log pi - log reference|, per token [T]."""
    return (logprobs - reference).abs()


@dataclass(frozen=True)
class Divergence:
    """An estimator with the gradient of another, both of a clamped log-ratio."""

    estimator: Estimator
    gradient: Estimator | None = None
    """Whose gradient is taken; None: the estimator's own."""
    bound: float | None = None
    """Clamps the value to [-bound, bound], and log reference - log pi to 20 nats; beyond either there is no
    gradient."""

    def __call__(self, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Per token [T]."""
        if self.bound is not None:
            # e^20 = 4.9e8 is far from overflow, and its square too. verl clamps at 20 as well (kl_penalty_forward in
            # verl/trainer/ppo/core_algos.py), and the value at 10, which is `bound` here.
            reference = logprobs + (reference - logprobs).clamp(-20.0, 20.0)
        value = self.estimator(logprobs, reference)
        if self.gradient is not None:
            # Straight-through: the bracket is 0 in value and has the gradient of `pulled`.
            pulled = self.gradient(logprobs, reference)
            value = value.detach() + (pulled - pulled.detach())
        if self.bound is None:
            return value
        return value.clamp(-self.bound, self.bound)


@dataclass(frozen=True)
class KLPenalty(Loss):
    """The estimator averaged like the policy loss."""

    estimator: Estimator
    average: Average
    weighted: bool = False
    """Times pi / pi_proximal with its gradient, which makes the gradient of k3 that of the KL also off-policy
    (DeepSeek-V3.2, 2025)."""

    @property
    def needs(self) -> frozenset[Need]:
        """The policy's and the reference's log-probs, and the proximal ones for the ratio."""
        both = {Need("logprobs", grad=True), Need("logprobs", REFERENCE)}
        return frozenset(both | ({Need("logprobs", PROXIMAL)} if self.weighted else set()))

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T], in nats.
        divergence = self.estimator(tokens.logprobs, tokens.reference_logprobs)
        metrics = {"kl/ref": divergence.detach()}
        if self.weighted:
            # E under proximal of rho f = E under pi of f: the ratio belongs to the expectation and is differentiated
            # with it.
            divergence = divergence * (tokens.logprobs - tokens.proximal_logprobs).exp()
        return LossTerm(tokens.average(divergence, self.average, over), metrics)
