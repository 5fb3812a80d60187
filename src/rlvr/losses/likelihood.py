"""The likelihood (SFT) loss: minus the log-probs of the tokens that carry the weight `weight/likelihood`."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.needs import Need


@dataclass(frozen=True)
class LikelihoodLoss:
    """Cross-entropy on demonstrations."""

    average: Average = "tokens"

    needs = frozenset({Need("logprobs", grad=True)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        return LossTerm(-tokens.average(tokens.logprobs, self.average, over))
