"""Trajectory balance: sample every response as often as its reward says, not only the best one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlvr.components import SequenceLoss
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar, refuse_below
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average
from rlvr.registry import register


@register("loss", "trajectory_balance")
@dataclass(frozen=True)
class TrajectoryBalance(SequenceLoss):
    """(log Z + log pi(y) - log R(y))^2, log R = log(floor + scale x reward), log Z the group's mean of log R - log pi.

    The flow of reasoning (Yu et al. 2024, arXiv 2406.05673), whose terminal rewards 100 and 0.001 are the defaults
    (Yu-Fangxu/FoR, commit 84c8f82, Game24/lightning_module.py); log Z is a mean over the samples of a problem
    (`tb_loss` with `logpartition` in BlocksWorld/util.py, as BlocksWorld/lightning_module_selection.py calls it;
    log-partition variance, Zhang et al. 2023, arXiv 2302.05446). log pi is the sum over the response, so every solution
    becomes likely in proportion to its reward. Where log-ratios are small, the gradient is that of REINFORCE on log R -
    log pi with the group's mean as the baseline. A mean over responses; a group of one has no gradient. Responses of
    any origin will do.
    """

    scale: Scalar = 100.0
    """Factor of the reward, before `floor` is added; above 0."""
    floor: Scalar = 1e-3
    """Added to every reward, so that a reward of 0 has a logarithm; above 0."""

    average: ClassVar[Average] = "sequences"
    smallest_group: ClassVar[int] = 2
    needs = frozenset({Need("logprobs", grad=True)})

    def __post_init__(self) -> None:
        refuse_below("scale", self.scale, 0, above=True)
        refuse_below("floor", self.floor, 0, above=True)

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss. ValueError for a negative reward, which has no logarithm."""
        reward = sequences.reward
        size = sequences.group_size()
        if bool((reward < 0).any()):
            raise ValueError(
                f"the loss trajectory_balance takes the logarithm of the reward, and found {float(reward.min()):g}: "
                "use rewards of at least 0"
            )
        # [S] log pi(y) - log R(y), with R = floor + scale x reward.
        balance = sequences.logprobs - (float(self.floor) + float(self.scale) * reward).log()
        # [S] log Z + log pi - log R, as log Z is the group's mean of log R - log pi. That mean is differentiated too,
        # which changes nothing: the residuals of a group sum to 0.
        residual = balance - sequences.group_sum(balance) / size
        return residual.square() / max(1, len(reward))
