"""Supervised learning that looks ahead: the likelihood with a temporal-difference term on the policy's own logits."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.components import Loss
from rlvr.core.needs import CURRENT, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch, next_of_sequence
from rlvr.registry import register


@register("auxiliary", "inverse_soft_q")
@dataclass(frozen=True)
class InverseSoftQ(Loss):
    """-log pi + penalty (Q - discount V')^2, Q the token's own logit and V' the logsumexp of the logits at the next
    token.

    Inverse soft Q-learning as regularised likelihood (Wulfmeier et al. 2024, arXiv 2409.01369; that it is the
    likelihood with a temporal-difference term stands in its abstract, the square in a summary of its equation 14). The
    bracket is the reward that the demonstrations imply for the token; after the last token V' is 0. Penalty 0 is the
    likelihood."""

    penalty: Scalar = 0.1
    """Weight of the temporal-difference term, at least 0; lambda in the paper."""
    discount: Scalar = 1.0
    """Weight of the next value, 0 to 1."""
    average: Average = "tokens"
    """tokens: every token weighs the same; sequences: every response; groups: every task; constant: divide by a fixed
    length."""

    needs = frozenset({Need("logprobs", grad=True), Need("logsumexp", grad=True)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T] V(s_t) = logsumexp of the logits at the token's own position.
        value = tokens.statistics["logsumexp", CURRENT]
        # Q(s_t, y_t) is the token's logit, log pi + V(s_t), and the implied reward r_t = Q(s_t, y_t) - discount
        # V(s_(t+1)).
        implied = tokens.logprobs + value - float(self.discount) * next_of_sequence(value, tokens.sequence)
        loss = -tokens.logprobs + float(self.penalty) * implied.square()
        return LossTerm(tokens.average(loss, self.average, over), {"loss/implied_reward": implied.detach()})
