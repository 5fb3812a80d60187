"""M2PO: bound the second moment of the step's log-ratios by leaving out its largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.averaged_loss import AveragedLoss
from rlvr.losses.tokens import Denominators, LossTerm, TokenBatch, log_ratio
from rlvr.registry import register


@register("loss", "m2po")
@dataclass(frozen=True)
class SecondMomentLoss(AveragedLoss):
    """-M rho A, M 0 at the fewest tokens whose leaving makes the mean of (log rho)^2 over the step at most the bound.

    Second-Moment Trust Policy Optimization (Zheng et al. 2025, arXiv 2510.01161), with the mask as AReaL has it: tokens
    of any advantage are left out, the largest log-ratios first. There is no other clip. A bound that no step reaches
    makes it `clip` with clip none.
    """

    moment: Scalar = 0.04
    """Bound of the mean squared log-ratio, nats squared, above 0."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    chooses_by = frozenset({Need("logprobs"), Need("logprobs", PROXIMAL)})

    def choose(self, tokens: TokenBatch) -> torch.Tensor:
        """1 where the token is left out, else 0, [T]."""
        # float64 [T], all tokens of the optimizer step: M_2 = mean of (log rho)^2 over those that are kept.
        squares = log_ratio(tokens).detach().square()
        ordered, order = squares.sort()
        # Means over the k smallest squares. They rise with k, since every further square is at least as large as those
        # before, so the number of means within the bound is the most tokens that can be kept.
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=squares.device)
        kept = int((means <= float(self.moment)).sum())
        return torch.zeros_like(squares).index_fill(0, order[kept:], 1.0)

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        assert tokens.chosen is not None
        out = tokens.chosen > 0
        log_ratios = log_ratio(tokens)
        # Both factors are filled: an overflowing ratio times an advantage of 0 would be NaN.
        value = log_ratios.masked_fill(out, 0.0).exp() * tokens.advantage.masked_fill(out, 0.0)
        ratio = log_ratios.detach().exp()
        metrics = {"ratio/mean": ratio, "ratio/max": ratio, "tokens/chosen": tokens.chosen}
        return LossTerm(-tokens.average(value, self.average, over), metrics)
