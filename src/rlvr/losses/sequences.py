"""Losses of whole responses: what such a loss sees, and how its groups and pairs are found.

A loss of this kind compares responses of an optimizer step that need not fit one micro-batch. It is shown the sums of
their log-probs, computed without gradient, and gives the loss of each response; the learner differentiates these with
respect to the sums, and weighs log-probs by what it got in the pass that has gradients. That is the exact gradient
however the step is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequenceBatch:
    """The responses of one optimizer step that a component trains, every tensor [S] in float64.

    Log-probs are sums over the response's trained tokens, each times its weight; those of models that the loss did not
    ask for are NaN.
    """

    logprobs: torch.Tensor
    """Under the current weights; what the loss is differentiated in."""
    proximal: torch.Tensor
    """Under the policy that ratios are taken to: the current one, detached, on a batch's first optimizer step."""
    reference: torch.Tensor
    length: torch.Tensor
    """Sum of the token weights."""
    group: torch.Tensor
    """int64: responses to the same draw of a task share a number, 0 .. the number of groups - 1."""
    reward: torch.Tensor
    advantage: torch.Tensor
    """The mean over the response's trained tokens."""

    def group_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[S] -> [S]: the sum over each one's group."""
        groups = int(self.group.max()) + 1 if len(self.group) else 0
        # [S] -> [G] -> [S]
        return torch.zeros(groups, dtype=values.dtype).index_add(0, self.group, values)[self.group]

    def group_size(self) -> torch.Tensor:
        """Members of each one's group [S]."""
        return self.group_sum(torch.ones_like(self.reward))

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All ordered pairs (better, worse) of a group's members with different rewards, as two lists of positions."""
        # bool [S, S]: 1 MiB for 1,024 responses of an optimizer step.
        same = self.group[:, None] == self.group[None, :]
        better, worse = (same & (self.reward[:, None] > self.reward[None, :])).nonzero(as_tuple=True)
        return better, worse
