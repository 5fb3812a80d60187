"""The negative log-likelihood as a loss: of the sft stage, and as an auxiliary term beside the policy loss."""

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
    """Cross-entropy: the weighted average of the negative log-probs of the trained tokens."""

    average: Average = "tokens"

    needs = frozenset({Need("logprobs", grad=True)})

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        return LossTerm(-tokens.average(tokens.logprobs, self.average, over))


@register("auxiliary", "likelihood")
@dataclass(frozen=True)
class ChosenLikelihood(Loss):
    """The negative log-likelihood of demonstrations or of selected sampled responses, added to the policy loss.

    `on: demonstrations` mixes supervised fine-tuning into the optimizer step (CHORD, Zhang et al. 2025, arXiv
    2508.11408): each group adds the demonstration of its task once, and the component's `coef`, which may be
    scheduled or driven by a metric, weighs the term. `on: right` and `on: best` imitate responses that the policy
    itself sampled.
    """

    on: Literal["demonstrations", "right", "best"] = "right"
    """demonstrations: those of the tasks (a task without one adds nothing); right: sampled responses with a reward of
    at least `threshold`; best: the response with the highest reward of each group (the first of several), unless all
    rewards of the group are equal."""
    threshold: float = 1.0
    """The lowest reward of a response that `on: right` trains on."""
    weigh: Literal["evenly", "by_doubt"] = "evenly"
    """evenly: every token weighs 1; by_doubt: a token of probability p weighs p (1 - p), with no gradient through the
    weight, so that tokens with p near 0 or 1 have little effect (phi in CHORD)."""
    average: Average = "tokens"
    """tokens: every token weighs the same; sequences: every response; groups: every group; constant: divide by a fixed
    length."""

    needs = frozenset({Need("logprobs", grad=True)})

    @property
    def shows_demonstrations(self) -> bool:
        """Return True if the stage must add the tasks' demonstrations to the batch."""
        return self.on == "demonstrations"

    def weights(self, batch: Batch) -> list[np.ndarray]:
        """Return 1 for each token to train on and 0 for the others: one float32 array [T_b] for each rollout."""
        if self.on == "demonstrations":
            return [(r.origin == Origin.DEMONSTRATION).astype(np.float32) for r in batch.rollouts]
        reward = batch.column("reward")
        if self.on == "right":
            # bool [B]. The reward of an undecided response is NaN: as -inf it is below every threshold.
            chosen = np.nan_to_num(reward, nan=-np.inf) >= self.threshold
        else:
            chosen = np.zeros(len(batch), dtype=bool)
            for group in batch.groups():
                values = reward[group.index]
                # If all rewards of a group are equal, no response is better than another: training on the first would
                # raise the probability of an arbitrary sample.
                if np.isfinite(values).any() and np.nanmax(values) > np.nanmin(values):
                    chosen[group.index[int(np.nanargmax(values))]] = True
        return [
            ((r.origin == Origin.POLICY) & is_chosen).astype(np.float32)
            for r, is_chosen in zip(batch.rollouts, chosen, strict=True)
        ]

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        logprobs = tokens.logprobs
        if self.weigh == "by_doubt":
            # [T]. p (1 - p) is largest at p = 1/2. It is detached: it scales the gradient of each token's log-prob and
            # adds no gradient of its own. The denominators of the average do not count it.
            p = logprobs.detach().exp()
            logprobs = p * (1 - p) * logprobs
        return LossTerm(-tokens.average(logprobs, self.average, over))
