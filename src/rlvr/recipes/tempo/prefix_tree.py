"""Credit where a group's responses part: the tree of their common prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.advantages.group import FlatTokens, decided, means, same, stds
from rlvr.components import Advantage
from rlvr.core.schedules import Scalar
from rlvr.records import Batch, Origin
from rlvr.registry import register


@register("advantage", "prefix_tree")
@dataclass(frozen=True)
class PrefixTree(Advantage):
    """(r - mean + branch (V after the token - V before it)) / std, V the mean reward of the responses with that prefix.

    TEMPO (Tran et al. 2025, arXiv 2509.18314; github fatebreaker/tempo, commit 0a1c273, verl/trainer/ppo/core_algos.py,
    compute_tempo_outcome_advantage). The second term is not 0 only where responses of the group part, so it says which
    branch was the better one; no critic, no further sampling. branch 0 is the group's mean and standard deviation
    (GRPO). Prefixes are compared by the token ids that were not prompt; undecided responses are in no mean and have 0,
    as has a group of equal rewards."""

    branch: Scalar = 1.0
    """Weight of the second term."""
    epsilon: float = 1e-4
    """Added to the standard deviation."""
    unbiased: bool = False
    """A standard deviation with n - 1, as in the authors' code."""
    smallest_group: ClassVar = 2
    per_token: ClassVar = True

    def __call__(self, batch: Batch) -> list[np.ndarray]:
        rewards = batch.column("reward")
        groups = batch.group_index()
        tokens = FlatTokens.of(batch)
        result = np.zeros(len(tokens.sampled))
        on = decided(batch)
        if not on.any():
            return tokens.split(result)
        flat = np.ones(int(groups.max()) + 1, dtype=bool)
        equal_rewards = same(rewards[on], groups[on])
        # [G]; the last groups may have no decided member and then stay flat.
        flat[: len(equal_rewards)] = equal_rewards
        live = on & ~flat[groups]
        origins = np.concatenate([r.origin for r in batch.rollouts])
        # bool [N]. Tokens of tools and hints are part of a prefix too: what follows depends on them.
        written = (origins != Origin.PROMPT) & live[tokens.rollout]
        of = tokens.rollout[written]
        ids = np.concatenate([r.token_ids for r in batch.rollouts])[written]
        r = np.where(live, rewards, 0.0)[live]
        g = groups[live]
        center = np.zeros(len(batch))
        spread = np.ones(len(batch))
        center[live] = r - means(r, g)[g]
        spread[live] = stds(r, g, self.unbiased)[g] + self.epsilon
        steps = branches(ids, np.bincount(of, minlength=len(batch)), np.where(live, rewards, 0.0), groups, live)
        # (r - mean + branch (V_after - V_before)) / (std + epsilon), one number per written token.
        values = (center[of] + float(self.branch) * steps) / spread[of]
        result[written] = np.where(tokens.sampled[written], values, 0.0)
        return tokens.split(result)


def branches(
    ids: np.ndarray, sizes: np.ndarray, rewards: np.ndarray, groups: np.ndarray, live: np.ndarray
) -> np.ndarray:
    """Per token, how the mean reward of the responses of its group with its prefix changes by the token.

    `ids` [N] are the tokens of the `live` responses one after the other, `sizes` [B] their numbers (0 for others). All
    groups go on token by token together; a response that is alone in its branch is not looked at again, so the work is
    that of the common prefixes.
    """
    steps = np.zeros(len(ids))
    starts = np.cumsum(sizes) - sizes
    members = np.flatnonzero(live)
    # int64 [members]: the prefix that each response has in common with others, at first the empty one of its group.
    node = np.unique(groups[members], return_inverse=True)[1]
    t = 0
    while len(members):
        # V of every node, before the responses that end here are dropped: these had the prefix too.
        before = means(rewards[members], node)
        count = np.bincount(node)
        goes_on = sizes[members] > t
        members = members[goes_on]
        node = node[goes_on]
        at = starts[members] + t
        token = np.unique(ids[at], return_inverse=True)[1]
        # A number for each pair (node, token): tokens are renumbered first, so that the product cannot overflow int64.
        child = np.unique(node * (int(token.max(initial=0)) + 1) + token, return_inverse=True)[1]
        after = means(rewards[members], child)
        size = np.bincount(child)
        # Where all go the same way V does not change, up to rounding; that is made exactly 0.
        parted = size[child] < count[node]
        steps[at] = np.where(parted, after[child] - before[node], 0.0)
        # Alone in a branch, V is the response's own reward from here on and every further step is 0.
        more = size[child] > 1
        members = members[more]
        t = t + 1
        node = np.unique(child[more], return_inverse=True)[1]
    return steps
