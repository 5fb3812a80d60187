"""An implicit reward model: a classifier of single responses by their log-ratio to the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rlvr.components import SequenceLoss
from rlvr.core.needs import REFERENCE, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average
from rlvr.registry import register


@register("auxiliary", "outcome_classifier")
@dataclass(frozen=True)
class OutcomeClassifier(SequenceLoss):
    """Cross-entropy of the reward (0 to 1) against beta log pi / pi_reference of the whole response.

    An implicit reward model (Yuan et al. 2024, "Free process rewards without process labels", arXiv 2412.01981, the
    cross-entropy form; github PRIME-RL/ImplicitPRM, commit c044175, train/openrlhf/trainer/ce_trainer.py): once it is
    trained, the same log-ratio over a part of a response is that part's reward. A mean over responses; no pairs or
    groups are needed. The loss `pacs` is this with the group's other scores taken off."""

    beta: Scalar = 0.05
    """Scale from log-ratio to logit, above 0."""

    average: ClassVar[Average] = "sequences"
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", REFERENCE)})

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss. ValueError for a reward outside [0, 1]."""
        reward = sequences.reward
        if bool(((reward < 0) | (reward > 1)).any()):
            raise ValueError(
                "the auxiliary outcome_classifier takes the reward for a probability, and found "
                f"{float(reward.min()):g} to {float(reward.max()):g}: use rewards within [0, 1]"
            )
        # [S] logits: the implicit reward beta log pi / pi_reference.
        score = float(self.beta) * (sequences.logprobs - sequences.reference)
        return binary_cross_entropy_with_logits(score, reward, reduction="none") / max(1, len(reward))
