"""The likelihood (SFT) loss, of demonstrations and of the policy's own chosen responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.components import Loss
from rlvr.core.needs import Need
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.records import Batch, Origin
from rlvr.registry import register


@dataclass(frozen=True)
class LikelihoodLoss(Loss):
    """Minus the log-probs of the tokens that the component's weights mark: cross-entropy."""

    average: Average = "tokens"

    needs = frozenset({Need("logprobs", grad=True)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        return LossTerm(-tokens.average(tokens.logprobs, self.average, over))


@register("auxiliary", "likelihood")
@dataclass(frozen=True)
class ChosenLikelihood(Loss):
    """-log pi of chosen responses, or of the tasks' demonstrations, beside the policy loss.

    With demonstrations: supervised learning mixed into the same step, each task's worked response once per group, its
    weight as the component's `coef`, which may be scheduled or driven (CHORD, Zhang et al. 2025, arXiv 2508.11408).
    With right or best: imitation of the policy's own successes.
    """

    on: Literal["demonstrations", "right", "best"] = "right"
    """demonstrations: those of the tasks (a task without any adds nothing); right: responses whose reward is at least
    `threshold`; best: the first of the highest reward in each group whose rewards differ."""
    threshold: float = 1.0
    """A reward of at least this is right."""
    weigh: Literal["evenly", "by_doubt"] = "evenly"
    """evenly: every token weighs 1; by_doubt: p (1 - p), p the token's probability as a constant, so that neither
    certain nor impossible tokens are pushed (CHORD's phi)."""
    average: Average = "tokens"
    """tokens: every token weighs the same; sequences: every response; groups: every group; constant: divide by a fixed
    length."""

    needs = frozenset({Need("logprobs", grad=True)})

    @property
    def shows_demonstrations(self) -> bool:
        """Return whether the tasks' demonstrations are to be put into the batch."""
        return self.on == "demonstrations"

    def weights(self, batch: Batch) -> list[np.ndarray]:
        """Which tokens it trains: 1 for those of the chosen responses, else 0; float32 [T_b] each."""
        if self.on == "demonstrations":
            return [(r.origin == Origin.DEMONSTRATION).astype(np.float32) for r in batch.rollouts]
        reward = batch.column("reward")
        if self.on == "right":
            # bool [B]; an undecided response is never taken for a right one.
            chosen = np.nan_to_num(reward, nan=-np.inf) >= self.threshold
        else:
            chosen = np.zeros(len(batch), dtype=bool)
            for group in batch.groups():
                values = reward[group.index]
                # Where all rewards are equal there is no best response, and imitating the first one would only sharpen
                # the policy.
                if np.isfinite(values).any() and np.nanmax(values) > np.nanmin(values):
                    chosen[group.index[int(np.nanargmax(values))]] = True
        return [
            ((r.origin == Origin.POLICY) & on).astype(np.float32) for r, on in zip(batch.rollouts, chosen, strict=True)
        ]

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        logprobs = tokens.logprobs
        if self.weigh == "by_doubt":
            # [T]. phi = p (1 - p) is largest at p = 1/2; as a constant it changes the weight of a token and not its
            # direction.
            p = logprobs.detach().exp()
            logprobs = p * (1 - p) * logprobs
        return LossTerm(-tokens.average(logprobs, self.average, over))
