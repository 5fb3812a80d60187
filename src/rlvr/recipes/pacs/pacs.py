"""PACS: predict the reward from the policy's own log-ratio, as a classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rlvr.components import SequenceLoss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average
from rlvr.registry import register


@register("loss", "pacs")
@dataclass(frozen=True)
class RewardClassification(SequenceLoss):
    """Cross-entropy of the reward (0 to 1) against psi_i = s_i - mean of the group's other s_j, s = beta log pi /
    pi_proximal.

    Implicit actor-critic coupling (Li et al. 2025, arXiv 2509.02522; checked against the authors' code, where the ratio
    is to the policy that sampled). The log-ratio is that of the whole response. A mean over responses; those of groups
    with one member have no psi and count with none.
    """

    beta: Scalar = 1.0
    """Scale from log-ratio to logit, above 0."""
    balanced: bool = True
    """Weigh right and wrong responses of a group so that both count the same: n / (2 n_class) where a group has
    both."""

    average: ClassVar[Average] = "sequences"
    smallest_group: ClassVar[int] = 2
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    degenerate_on_policy = True

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss. ValueError for a reward outside [0, 1]."""
        reward = sequences.reward
        size = sequences.group_size()
        # Cross-entropy has no minimum for a target outside [0, 1]: the loss would run away and not fail.
        if bool(((reward < 0) | (reward > 1)).any()):
            raise ValueError(
                f"the loss pacs takes the reward for a probability, and found {float(reward.min()):g} to "
                f"{float(reward.max()):g}: use rewards within [0, 1]"
            )
        # [S] s_i = beta log(pi(y_i) / pi_proximal(y_i)).
        score = float(self.beta) * (sequences.logprobs - sequences.proximal)
        # [S]: mean over the n - 1 other members; clamp_min is for groups of one, which are masked below.
        others = (sequences.group_sum(score) - score) / (size - 1).clamp_min(1)
        loss = binary_cross_entropy_with_logits(score - others, reward, reduction="none")
        if self.balanced:
            # [S] each: the members of the response's group with reward 1 and with reward 0.
            right = sequences.group_sum((reward == 1).double())
            wrong = sequences.group_sum((reward == 0).double())
            # A group with a reward between 0 and 1 has no two classes to balance.
            mixed = (right > 0) & (wrong > 0) & (right + wrong == size)
            loss = loss * torch.where(mixed, size / (2 * torch.where(reward == 1, right, wrong)).clamp_min(1), 1.0)
        alone = size < 2
        # Summed over responses this is the mean over those that have other members.
        return loss.masked_fill(alone, 0.0) / (~alone).sum().clamp_min(1)
