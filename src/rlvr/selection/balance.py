"""Selectors that keep kinds of rollouts in proportion: sources of tasks, right and wrong answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.components import Selector
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.selection.member_selectors import positions, ranked


@register("selector", "balance_sources")
@dataclass(frozen=True)
class BalanceSources(Selector):
    """Keep as many groups of each source of tasks as the rarest source has, whole groups, most varied rewards first.

    Ties are broken by the draw's name, groups of equal rewards come last. With one source nothing changes.
    """

    most: float = 1.0
    """A source may keep this many times the groups of the rarest one, at least 1."""

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
            # Negative spread, so that sorting upwards puts the most varied groups first.
            by_source.setdefault(group.rollouts[0].task.source, []).append((-spread, group.key, group.index))
        least = min(map(len, by_source.values()), default=0)
        keep = int(self.most * least)
        return positions([index for groups in by_source.values() for *_, index in sorted(groups, key=_rank)[:keep]])


def _rank(group: tuple[float, str, np.ndarray]) -> tuple[float, str]:
    # The positions are left out: arrays cannot be compared by a sort.
    return group[:2]


@register("selector", "balance_outcomes")
@dataclass(frozen=True)
class BalanceOutcomes(Selector):
    """Keep as many right as wrong members of each group, or at most so many times the rarer kind.

    Right is a reward above `threshold`. Of the commoner kind, members with the highest rewards (if right) or the lowest
    (if wrong) stay, ties by member. A group with one kind only is kept whole: it has nothing to balance, and
    `mixed_groups` drops it. Undecided members are dropped.
    """

    most: float = 1.0
    """How many times the rarer kind the commoner one may have, at least 1."""
    threshold: float = 0.5
    """Rewards above it are right."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most is {self.most}: it must be at least 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        kept = []
        for order in ranked(batch, "reward"):
            right = rewards[order] > self.threshold
            wrong = order[~right]
            # `ranked` puts the smallest reward first; reversed, the highest of the right ones stay.
            good = order[right][::-1]
            # 0 where one kind is missing, in which case the group stays whole.
            limit = int(self.most * min(len(wrong), len(good)))
            kept += [order] if not limit else [wrong[:limit], good[:limit]]
        return positions(kept)
