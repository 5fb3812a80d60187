"""Credit where a group's responses part: the tree of their common prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.records import Batch
from rlvr.registry import register
from rlvr.schedules import Scalar


@register("advantage", "prefix_tree")
@dataclass(frozen=True)
class PrefixTree:
    """(r - mean + branch (V after the token - V before it)) / std, V the mean reward of the responses with that prefix.

    TEMPO (Tran et al. 2025, arXiv 2509.18314; from notes and a summary, by which prefix values are means of normalised rewards). The second term is not 0 only where
    responses of the group part, so it says which branch was the better one; no critic, no further sampling. branch 0 is the
    group's mean and standard deviation (GRPO). Prefixes are compared by the token ids that were not prompt; undecided
    responses are in no mean and have 0, as has a group of equal rewards.
    """

    branch: Scalar = 1.0
    """Weight of the second term."""
    epsilon: float = 1e-4
    """Added to the standard deviation."""
    smallest_group: ClassVar = 2
    per_token: ClassVar = True

    def __call__(self, batch: Batch) -> list[np.ndarray]:
        rewards, weight = batch.column("reward"), float(self.branch)  # type: ignore[arg-type]
        result = [np.zeros(len(r)) for r in batch.rollouts]
        for group in batch.groups():
            index = group.index[np.isfinite(rewards[group.index])]
            r = rewards[index]
            if not len(index) or r.min() == r.max():
                continue
            written = [batch.rollouts[i].origin != 0 for i in index]
            ids = [batch.rollouts[i].token_ids[on] for i, on in zip(index, written, strict=True)]
            for i, on, reward, steps in zip(index, written, r, branches(ids, r), strict=True):
                values = (reward - r.mean() + weight * steps) / (r.std() + self.epsilon)
                result[i][on] = np.where(batch.rollouts[i].sampled[on], values, 0.0)
        return result


def branches(ids: list[np.ndarray], rewards: np.ndarray) -> list[np.ndarray]:
    """For each response, per token, how the mean reward of the responses with its prefix changes by the token.

    The work is that of the common prefixes: a response that is alone in its branch is not looked at again.
    """
    steps = [np.zeros(len(one)) for one in ids]
    together = [(0, list(range(len(ids))))]
    while together:
        t, members = together.pop()
        by_token: dict[int, list[int]] = {}
        for m in members:
            if t < len(ids[m]):
                by_token.setdefault(int(ids[m][t]), []).append(m)
        before = rewards[members].mean()
        for branch in by_token.values():
            change = rewards[branch].mean() - before if len(branch) < len(members) else 0.0
            for m in branch:
                steps[m][t] = change
            if len(branch) > 1:
                together.append((t + 1, branch))
    return steps
