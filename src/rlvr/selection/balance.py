"""Selectors that bound the ratio of two kinds of rollouts: of different task sources, or right and wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlvr.components import Selector
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.selection.member_selectors import positions, ranked

ROUNDING = 1e-9
"""Added before a product is rounded down: 1.15 x 100 is 114.99999999999999 in float64."""


@register("selector", "balance_sources")
@dataclass(frozen=True)
class BalanceSources(Selector):
    """Keep from each task source at most `most` times as many groups as the source with the fewest groups has.

    Groups are kept whole. A source with too many keeps those whose rewards have the highest standard deviation; of
    groups with the same deviation, the one whose draw has the smaller name. With one source nothing changes.
    """

    most: float = 1.0
    """The largest number of groups of a source, as a multiple of the smallest source's; at least 1."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most is {self.most}: it must be at least 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        by_source: dict[str | None, list[tuple[float, str, np.ndarray]]] = {}
        for group in batch.groups():
            finite = rewards[group.index][np.isfinite(rewards[group.index])]
            if len(finite) and finite.min() < finite.max():
                spread = float(finite.std())
            else:
                spread = 0.0
            # Negative, so that an ascending sort puts the largest deviation first.
            by_source.setdefault(group.rollouts[0].task.source, []).append((-spread, group.key, group.index))
        least = min(map(len, by_source.values()), default=0)
        keep = math.floor(self.most * least + ROUNDING)
        return positions([index for groups in by_source.values() for *_, index in sorted(groups, key=_sort_key)[:keep]])


def _sort_key(group: tuple[float, str, np.ndarray]) -> tuple[float, str]:
    # Without the positions: a sort cannot compare arrays.
    return group[:2]


@register("selector", "balance_outcomes")
@dataclass(frozen=True)
class BalanceOutcomes(Selector):
    """Keep at most `most` times as many members of the commoner kind, right or wrong, as of the rarer, in each group.

    A member is right if its reward is above `threshold`, else wrong. Right members with the highest rewards and wrong
    members with the lowest rewards stay; of equal rewards, the later member among the right ones and the earlier among
    the wrong ones. A group of one kind only has nothing to balance and keeps all of its members; the selector
    `mixed_groups` drops such groups. Undecided members are dropped from every group.
    """

    most: float = 1.0
    """The largest number of members of the commoner kind, as a multiple of the rarer kind's; at least 1."""
    threshold: float = 0.5
    """Rewards above it are right."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most is {self.most}: it must be at least 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        kept = []
        for order in ranked(batch, "reward"):
            is_right = rewards[order] > self.threshold
            # `ranked` gives positions in ascending order of reward: the wrong members with the lowest rewards come
            # first, and after the reversal the right members with the highest.
            wrong = order[~is_right]
            right = order[is_right][::-1]
            # 0 if the group has one kind only.
            limit = math.floor(self.most * min(len(wrong), len(right)) + ROUNDING)
            kept += [order] if not limit else [wrong[:limit], right[:limit]]
        return positions(kept)
