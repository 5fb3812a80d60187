"""Losses without a ratio: REINFORCE, the weighted likelihood and the entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.components import Loss
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar, refuse_below
from rlvr.losses.averaged_loss import AveragedLoss
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.registry import register


@register("loss", "reinforce")
@dataclass(frozen=True)
class Reinforce(AveragedLoss):
    """-A log pi (Williams 1992); the policy loss of GPG (Chu et al. 2025, arXiv 2504.02546).

    At ratio 1 it has the gradient of every clipped loss. On later optimizer steps of a batch nothing holds it near the
    policy that sampled.
    """

    needs = frozenset({Need("logprobs", grad=True)})
    zero_without_advantage = True

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T]; the gradient of A log pi is A grad log pi, whatever the policy that sampled.
        return LossTerm(-tokens.average(tokens.advantage * tokens.logprobs, self.average, over))


@register("loss", "weighted_likelihood")
@dataclass(frozen=True)
class WeightedLikelihood(AveragedLoss):
    """-min(exp(A / temperature), most) log pi.

    Advantage-weighted regression (Peng et al. 2019, arXiv 1910.00177). It never pushes a response down, and needs no
    behaviour log-probs. A very high temperature makes it the plain likelihood of everything that was sampled.
    """

    temperature: Scalar = 1.0
    """The smaller, the more the best responses count; above 0."""
    most: Scalar = 20.0
    """Largest weight of a token, above 0."""

    needs = frozenset({Need("logprobs", grad=True)})

    def __post_init__(self) -> None:
        refuse_below("temperature", self.temperature, 0, above=True)

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        scaled = tokens.advantage / float(self.temperature)
        # [T]. exp(80) = 5.5e34 is finite in float32, so that the second clamp sees a number and not inf.
        weight = scaled.clamp_max(80.0).exp().clamp_max(float(self.most))
        return LossTerm(-tokens.average(weight * tokens.logprobs, self.average, over))


@dataclass(frozen=True)
class EntropyBonus(Loss):
    """-H, averaged like the policy loss; its coefficient is positive to keep the policy spread out."""

    average: Average
    coef: Scalar = 0.0

    needs = frozenset({Need("entropy", grad=True)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # The learner minimises, so -H with a positive coefficient raises the entropy. tokens.entropy is [T], in nats.
        return LossTerm(-tokens.average(tokens.entropy, self.average, over))
