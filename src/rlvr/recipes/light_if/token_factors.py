"""The two token selectors of Light-IF: tokens of demonstrations to learn, and an entropy coefficient for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.components import TokenSelector
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.losses.tokens import TokenBatch
from rlvr.registry import register


@register("token_selector", "surprise_over_entropy")
@dataclass(frozen=True)
class SurpriseOverEntropy(TokenSelector):
    """The tokens of each sequence whose cross-entropy is the most above `entropy` times the policy's entropy there.

    int(`share` n) of a sequence's n tokens are kept, at least 1, each with the factor n over their number, so that the
    mean over the sequence's tokens is that over the kept ones. Tokens that are sure and wrong are learned, those at
    which the policy has many options are left as they are. Entropy-preserving supervised learning of Light-IF:
    Qihoo360/Light-IF, commit 01e9003, coldstart/LLAMA-Factory/src/llamafactory/train/sft/custom_entropy_trainer.py.
    """

    share: Scalar = 0.8
    """Share of each sequence's tokens that are learned, above 0 and at most 1."""
    entropy: Scalar = 0.8
    """Weight of the entropy, at least 0."""

    needs = frozenset({Need("logprobs"), Need("entropy")})

    def __post_init__(self) -> None:
        refuse_below("share", self.share, 0, above=True)
        refuse_above("share", self.share, 1)
        refuse_below("entropy", self.entropy, 0)

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        # [T]: delta = CE - coef H
        excess = -tokens.logprobs.detach() - float(self.entropy) * tokens.entropy.detach()
        # By sequence, within it from the largest excess to the smallest; both sorts are stable.
        order = excess.argsort(descending=True, stable=True)
        order = order[tokens.sequence[order].argsort(stable=True)]
        # [S]: the tokens of each sequence, and those of the sequences before it.
        counts = torch.bincount(tokens.sequence, minlength=tokens.sequences)
        before = counts.cumsum(0) - counts
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - before[tokens.sequence[order]]
        kept = (float(self.share) * counts.double()).long().clamp_min(1)
        factor = (counts / kept)[tokens.sequence].to(excess.dtype)
        return torch.where(rank < kept[tokens.sequence], factor, 0.0)


@register("token_selector", "covariance_softmax")
@dataclass(frozen=True)
class CovarianceSoftmax(TokenSelector):
    """A coefficient for each token of a sequence: `scale` times the softmax, over the sequence, of the covariance of
    advantage and log-prob at the token, at most `bound`.

    The covariance at a token is (A - mean A) (log p - mean log p), with means over the step's tokens; a sequence's mean
    log p cancels in the softmax. As factors of the entropy bonus (`algorithm.entropy_select`) they raise the entropy
    where learning would lower it the most: the entropy-adaptive reinforcement of Light-IF, Qihoo360/Light-IF, commit
    01e9003, rl/verl/verl/trainer/ppo/core_algos.py, compute_entropy_with_cov, whose coefficients have a gradient, too.
    """

    scale: Scalar = 10.0
    """The sum of a sequence's coefficients before they are bounded, at least 0."""
    bound: Scalar = 5.0
    """The largest coefficient of a token, at least 0."""

    needs = frozenset({Need("logprobs")})
    reads_advantage = True

    def __post_init__(self) -> None:
        refuse_below("scale", self.scale, 0)
        refuse_below("bound", self.bound, 0)

    def __call__(self, tokens: TokenBatch) -> torch.Tensor:
        # [T]
        centred = tokens.advantage - tokens.advantage.mean()
        covariance = centred * tokens.logprobs.detach()
        # [S]: the largest of each sequence is taken away before exp, so that none overflows.
        empty = torch.full((tokens.sequences,), -torch.inf, dtype=covariance.dtype, device=covariance.device)
        largest = empty.scatter_reduce(0, tokens.sequence, covariance, "amax")
        raised = (covariance - largest[tokens.sequence]).exp()
        sums = torch.zeros_like(largest).index_add(0, tokens.sequence, raised)
        return (float(self.scale) * raised / sums[tokens.sequence]).clamp(max=float(self.bound))
