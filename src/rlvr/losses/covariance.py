"""Clip-Cov and KL-Cov: hold back the few tokens at which log-probability and advantage move together most.

Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv 2505.22617):
entropy falls by the covariance of the two, and that is concentrated in a small share of tokens. Which tokens these are
is a matter of the whole optimizer step, so `choose` is shown all its tokens before it is cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.losses.averaged_loss import AveragedLoss
from rlvr.losses.clip import Surrogate, hard, unclipped
from rlvr.losses.tokens import Denominators, LossTerm, TokenBatch, log_ratio
from rlvr.registry import register


def covariances(tokens: TokenBatch) -> torch.Tensor:
    """(log pi - its mean) (A - its mean) [T], over the tokens given."""
    # The summands of Cov(log pi, A), to which the paper traces the fall of entropy; their mean over the step is that
    # number.
    logprobs = tokens.logprobs.detach()
    return (logprobs - logprobs.mean()) * (tokens.advantage - tokens.advantage.mean())


def _share_of(share: float, total: int, candidates: int) -> int:
    """The number of tokens that a share of `total` is, of so many candidates."""
    if share == 0:
        return 0
    # At least one token, as in verl's compute_policy_loss_clip_cov and _kl_cov (verl/trainer/ppo/core_algos.py).
    return min(candidates, max(1, int(share * total)))


@register("loss", "clip_cov")
@dataclass(frozen=True)
class ClipCovLoss(AveragedLoss):
    """The clipped policy loss without the gradient of some tokens of high covariance.

    Chosen are `share` of the step's tokens (at least one), at random among those whose covariance is between the bounds
    and which the clip does not bind already. The draw depends only on the numbers of tokens and candidates, so it is
    the same however the step is cut.
    """

    share: Scalar = 0.0002
    """Share of the step's tokens to be held back; 0: none, which is `clip`."""
    least: Scalar = 1.0
    """Candidates have a covariance above this."""
    most: Scalar = 5.0
    """Candidates have a covariance below this."""
    clip_low: Scalar = 0.2
    """As in `clip`."""
    clip_high: Scalar = 0.2
    """As in `clip`."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    chooses_by = frozenset({Need("logprobs"), Need("logprobs", PROXIMAL)})

    def __post_init__(self) -> None:
        refuse_below("share", self.share, 0)
        refuse_above("share", self.share, 1)
        refuse_below("clip_low", self.clip_low, 0)
        refuse_above("clip_low", self.clip_low, 1)
        refuse_below("clip_high", self.clip_high, 0)

    def choose(self, tokens: TokenBatch) -> torch.Tensor:
        """1 where the token is held back, else 0, [T]."""
        surrogate = self._surrogate(tokens)
        covariance = covariances(tokens)
        total = len(tokens.weight)
        # bool [T], over all tokens of the optimizer step.
        candidates = (covariance > float(self.least)) & (covariance < float(self.most))
        where = (candidates & ~(surrogate.low | surrogate.high)).nonzero()[:, 0]
        count = _share_of(self.share, total, len(where))
        # Every rank draws for itself and has to draw the same tokens, so the seed is made of counts that all of them
        # have. 1,000,003 is prime and above the number of candidates of any usual step, so other counts give another
        # seed.
        generator = torch.Generator().manual_seed(1_000_003 * total + len(where))
        drawn = where[torch.randperm(len(where), generator=generator)[:count].to(where.device)]
        return torch.zeros_like(covariance).index_fill(0, drawn, 1.0)

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        assert tokens.chosen is not None
        surrogate = self._surrogate(tokens)
        # bool [T]. A value of 0 has no gradient, and the token still counts in the denominators.
        held = tokens.chosen > 0
        ratio = (tokens.logprobs - tokens.proximal_logprobs).detach().exp()
        metrics = surrogate.metrics(ratio) | {"tokens/chosen": tokens.chosen}
        return LossTerm(-tokens.average(surrogate.value.masked_fill(held, 0.0), self.average, over), metrics)

    def _surrogate(self, tokens: TokenBatch) -> Surrogate:
        low = 1 - float(self.clip_low)
        high = 1 + float(self.clip_high)
        return hard(log_ratio(tokens), tokens.advantage, low, high, None)


@register("loss", "kl_cov")
@dataclass(frozen=True)
class KLCovLoss(AveragedLoss):
    """-rho A, plus coef |log rho| at the `share` of the step's tokens with the highest covariance.

    There is no clip: the penalty alone holds the chosen tokens where they were.
    """

    share: Scalar = 0.0002
    """Share of the step's tokens that are penalised, at least one; 0: none, which is `clip` with clip none."""
    coef: Scalar = 1.0
    """Weight of the penalty."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    chooses_by = frozenset({Need("logprobs")})
    degenerate_on_policy = True

    def __post_init__(self) -> None:
        refuse_below("share", self.share, 0)
        refuse_above("share", self.share, 1)

    def choose(self, tokens: TokenBatch) -> torch.Tensor:
        """1 where the token is penalised, else 0, [T]."""
        covariance = covariances(tokens)
        count = _share_of(self.share, len(covariance), len(covariance))
        return torch.zeros_like(covariance).index_fill(0, covariance.topk(count).indices, 1.0)

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        assert tokens.chosen is not None
        log_ratios = log_ratio(tokens)
        # [T]: coef |log rho| at the chosen tokens, 0 elsewhere; chosen is 0 or 1.
        penalty = float(self.coef) * tokens.chosen * log_ratios.abs()
        value = unclipped(log_ratios, tokens.advantage).value - penalty
        ratio = log_ratios.detach().exp()
        metrics = {"ratio/mean": ratio, "ratio/max": ratio, "tokens/chosen": tokens.chosen}
        return LossTerm(-tokens.average(value, self.average, over), metrics)
