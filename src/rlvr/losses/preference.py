"""Preference losses on the responses of a group: DPO and IPO on its pairs, KTO on its right and wrong ones.

Each is a component of the objective beside the policy loss, a function of the responses' log-ratios to the reference,
with the group's own rewards as preferences.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from rlvr.components import SequenceLoss
from rlvr.core.needs import REFERENCE, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average
from rlvr.registry import register

Pairs = Literal["all", "extremes"]


@dataclass(frozen=True)
class PairLoss(SequenceLoss):
    """A mean over pairs (better, worse) of a function of the margin between their log-ratios, half of it each one's
    share."""

    beta: Scalar = 0.1
    """Weight of staying near the reference, above 0."""
    pairs: Pairs = "all"
    """all: every two members of a group with different rewards; extremes: its best with its worst, the first of
    each."""

    average: ClassVar[Average] = "sequences"
    smallest_group: ClassVar[int] = 2
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", REFERENCE)})

    @abstractmethod
    def of_margin(self, margin: torch.Tensor) -> torch.Tensor:
        """The loss of each pair [N] from log pi / pi_reference of the better minus that of the worse."""

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss."""
        if self.pairs == "all":
            better, worse = sequences.pairs()
        else:
            better, worse = extremes(sequences)
        # [S] log pi / pi_reference of each response.
        ratio = sequences.logprobs - sequences.reference
        # [N] over all N pairs of the step. Half of a pair's loss goes to each member, so that the sum over responses
        # counts it once. Without a pair the loss is 0, not 0 / 0.
        loss = self.of_margin(ratio[better] - ratio[worse]) / max(1, len(better)) / 2
        return torch.zeros_like(ratio).index_add(0, better, loss).index_add(0, worse, loss)


@register("auxiliary", "dpo")
@dataclass(frozen=True)
class DPO(PairLoss):
    """-log sigmoid(beta margin): direct preference optimisation (Rafailov et al. 2023, eq. 7) on the group's own
    pairs."""

    smoothing: Scalar = 0.0
    """The share of pairs that are taken to be the other way round, at least 0 and below 0.5: conservative DPO, TRL's
    `label_smoothing`."""

    def of_margin(self, margin: torch.Tensor) -> torch.Tensor:
        scaled = float(self.beta) * margin
        flipped = float(self.smoothing)
        return -(1 - flipped) * logsigmoid(scaled) - flipped * logsigmoid(-scaled)


@register("auxiliary", "ipo")
@dataclass(frozen=True)
class IPO(PairLoss):
    """(margin - 1 / (2 beta))^2: identity preference optimisation (Azar et al. 2023, eq. 17) on the group's own
    pairs."""

    def of_margin(self, margin: torch.Tensor) -> torch.Tensor:
        # beta is tau in the paper: the margin is pulled to 1 / (2 tau) and no further.
        return (margin - 1 / (2 * float(self.beta))).square()


@register("auxiliary", "kto")
@dataclass(frozen=True)
class KTO(SequenceLoss):
    """Weight (1 - sigmoid(beta (r - z))) for right responses and weight (1 - sigmoid(beta (z - r))) for wrong ones.

    Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): r is log pi / pi_reference of the
    response, z the mean r of the step as a constant, at least 0 (the paper estimates z on mismatched pairs). Right are
    rewards of at least `threshold`. A mean over responses; no pairs are needed.
    """

    beta: Scalar = 0.1
    """Factor of the log-ratios inside the sigmoid, above 0; a larger one saturates the value sooner."""
    threshold: float = 0.5
    """A reward of at least this is right."""
    right: Scalar = 1.0
    """Weight of right responses."""
    wrong: Scalar = 1.0
    """Weight of wrong responses."""

    average: ClassVar[Average] = "sequences"
    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", REFERENCE)})

    def sequence_losses(self, sequences: SequenceBatch) -> torch.Tensor:
        """See SequenceLoss."""
        # [S] r_i = log pi / pi_reference of each response.
        ratio = sequences.logprobs - sequences.reference
        # []: z estimates KL(pi || reference), which is never negative; a constant, so that it has no gradient.
        zero = ratio.detach().mean().clamp_min(0.0)
        right = sequences.reward >= self.threshold
        # 1 - sigmoid(x) = sigmoid(-x): with sign +1 for right and -1 for wrong responses both cases are one expression.
        sign = torch.ones_like(ratio).masked_fill(~right, -1.0)
        weight = torch.full_like(ratio, float(self.wrong)).masked_fill(right, float(self.right))
        return weight * torch.sigmoid(-sign * float(self.beta) * (ratio - zero)) / max(1, len(ratio))


def extremes(sequences: SequenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The first best and the first worst of every group in which they differ, as two lists of positions."""
    better = []
    worse = []
    # A loop with reads from tensors is cheap here: the prepass is in host memory and runs once in an optimizer step.
    for number in sequences.group.unique().tolist():
        members = (sequences.group == number).nonzero()[:, 0]
        rewards = sequences.reward[members]
        if float(rewards.max()) > float(rewards.min()):
            # torch's argmax and argmin give the first of several equal ones.
            better.append(int(members[int(rewards.argmax())]))
            worse.append(int(members[int(rewards.argmin())]))
    return torch.tensor(better, dtype=torch.int64), torch.tensor(worse, dtype=torch.int64)
