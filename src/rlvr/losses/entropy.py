"""The entropy bonus: minus the mean entropy of the next-token distribution at the trained positions."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.components import Loss
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch


@dataclass(frozen=True)
class EntropyBonus(Loss):
    """-H, averaged like the policy loss; its coefficient is positive to keep the policy spread out."""

    average: Average
    coef: Scalar = 0.0

    needs = frozenset({Need("entropy", grad=True)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # The learner minimises, so -H with a positive coefficient raises the entropy. tokens.entropy is [T], in nats.
        return LossTerm(-tokens.average(tokens.entropy, self.average, over))
