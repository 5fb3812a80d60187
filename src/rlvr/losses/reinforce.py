"""REINFORCE: the policy gradient without a ratio."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.components import Loss
from rlvr.core.needs import Need
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.registry import register


@register("loss", "reinforce")
@dataclass(frozen=True)
class Reinforce(Loss):
    """-A log pi (Williams 1992); the policy loss of GPG (Chu et al. 2025, arXiv 2504.02546).

    At ratio 1 it has the gradient of every clipped loss. On later optimizer steps of a batch nothing holds it near the
    policy that sampled.
    """

    average: Average = "tokens"
    """tokens: every token weighs the same; sequences: every response; groups: every group; constant: divide by a fixed
    length."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens."""

    needs = frozenset({Need("logprobs", grad=True)})
    zero_without_advantage = True

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T]; the gradient of A log pi is A grad log pi, whatever the policy that sampled.
        return LossTerm(-tokens.average(tokens.advantage * tokens.logprobs, self.average, over))
