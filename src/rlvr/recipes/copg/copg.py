"""CoPG: contrast the responses of a group, on data of any origin, without importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlvr.components import SequenceLoss
from rlvr.core.needs import REFERENCE, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average
from rlvr.registry import register


@register("loss", "copg")
@dataclass(frozen=True)
class ContrastiveLoss(SequenceLoss):
    """-(Delta R Delta - beta / 2 Delta^2) for every pair of a group, Delta the log-ratio log pi / pi_reference.

    Contrastive Policy Gradient (Flet-Berliac et al. 2024, arXiv 2406.19185): its gradient at a pair (y, y') is that of
    (R_beta(y) - R_beta(y')) (log pi(y) - log pi(y')), with R_beta = R - beta log pi / pi_reference as a constant. A
    mean over the pairs of a group, then over groups with a pair. The rewards are raw; at beta 0 it is RLOO's gradient.
    """

    beta: Scalar = 0.1
    """Weight of staying near the reference, at least 0."""

    average: ClassVar[Average] = "sequences"
    smallest_group: ClassVar[int] = 2
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", REFERENCE)})

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss. In sums over the group, so that hundreds of members cost no square of theirs."""
        # float64 [S]: members of each response's group.
        size = sequences.group_size()

        def against_others(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """Sum over the other members j of (a_i - a_j) (b_i - b_j), [S]."""
            # sum_j (a_i - a_j) (b_i - b_j) = n a_i b_i - a_i sum(b) - b_i sum(a) + sum(a b) over a group of n.
            # Differences do not change when both are centred, and then the two middle terms are 0.
            a = a - sequences.group_sum(a) / size
            b = b - sequences.group_sum(b) / size
            return size * a * b + sequences.group_sum(a * b)

        # [S] log pi(y) - log pi_reference(y) of whole responses.
        log_ratio = sequences.logprobs - sequences.reference
        beta = float(self.beta)
        value = against_others(sequences.reward, log_ratio) - beta / 2 * against_others(log_ratio, log_ratio)
        alone = size < 2
        # The n members of a group add 1 / n each: the number of groups that have a pair. 1 where there is none, whose
        # sum is 0.
        groups = (1 / size).masked_fill(alone, 0.0).sum().clamp_min(1.0)
        # n (n - 1) ordered pairs: each pair is met from both of its members, so the mean over these is the mean over
        # pairs.
        return -value.masked_fill(alone, 0.0) / (size * (size - 1)).clamp_min(1) / groups
