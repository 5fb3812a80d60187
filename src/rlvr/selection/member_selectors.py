"""Selectors that keep some members of every group, or bound the ratio of two kinds of rollouts: of different task
sources, or right and wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import Selector
from rlvr.errors import ConfigError
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.selection.groups import decided_values, spread_of


def ranked(batch: Batch, by: str) -> Iterator[np.ndarray]:
    """For each group the positions of its members with a known value of the column `by`, smallest value first, ties by
    member."""
    values = batch.column(by)
    member = np.asarray([r.member for r in batch.rollouts], dtype=np.int64)
    for group in batch.groups():
        index = group.index[np.isfinite(values[group.index])]
        yield index[np.lexsort((member[index], values[index]))]


def positions(parts: list[np.ndarray]) -> np.ndarray:
    """The positions chosen, in the order of the batch."""
    if parts:
        return np.sort(np.concatenate(parts))
    return np.zeros(0, dtype=np.int64)


@register("selector", "best_worst")
@dataclass(frozen=True)
class BestWorst(Selector):
    """Keep the members of each group with the highest and with the lowest rewards.

    Best alone is best-of-n imitation under a positive advantage; both are the extremes of a wide group. A group with no
    more members than asked for stays whole.
    """

    best: int = 2
    """Number of members with the highest rewards to keep."""
    worst: int = 2
    """Number of members with the lowest rewards to keep."""
    column: str = "reward"
    """The column that members are ranked by: `reward`, `reward/TERM`, or `advantage` with `select_after`."""

    def __post_init__(self) -> None:
        if min(self.best, self.worst) < 0 or self.best + self.worst < 1:
            raise ValueError("best and worst must be at least 0, and one of them above it")

    @property
    def after(self) -> bool:
        """Return True if it reads advantages."""
        return self.column == "advantage"

    def __call__(self, batch: Batch) -> np.ndarray:
        kept = []
        for order in ranked(batch, self.column):
            whole = len(order) <= self.best + self.worst
            # len(order) - best, since order[-0:] would be all of them.
            kept.append(order if whole else np.concatenate([order[: self.worst], order[len(order) - self.best :]]))
        return positions(kept)


@register("selector", "most_varied")
@dataclass(frozen=True)
class MostVaried(Selector):
    """Keep the members of each group, so many, whose rewards have the largest variance.

    PODS, max-variance down-sampling (Xu et al. 2025, arXiv 2504.13818, theorem 1): the best subset of m is the i
    highest and the m - i lowest for some i, so m + 1 of them are compared. Of equally varied ones that with fewer high
    rewards is taken. A group with no more decided members stays whole.
    """

    keep: int = 4
    """Members to keep, at least 1."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}: it must be at least 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        return positions([self._chosen(order, rewards[order]) for order in ranked(batch, "reward")])

    def _chosen(self, order: np.ndarray, values: np.ndarray) -> np.ndarray:
        n = len(order)
        m = self.keep
        if n <= m:
            return order
        # [n], smallest first.
        values = values - values.mean()  # sums of squares lose less
        # [n + 1] each: sums of the first j values and of their squares, so that any i highest and m - i lowest cost two
        # look-ups.
        first, second = (np.concatenate([[0.0], np.cumsum(values**p)]) for p in (1, 2))
        high = np.arange(m + 1)
        low = m - high
        total, squares = (s[low] + s[n] - s[n - high] for s in (first, second))
        # [m + 1]: E[x^2] - E[x]^2 for each i from 0 to m. Rounded, so that equal variances are equal and argmax takes
        # the first.
        variance = np.round(squares / m - (total / m) ** 2, 12)
        i = int(np.argmax(variance))
        return np.concatenate([order[: m - i], order[n - i :]])


@register("selector", "shortest")
@dataclass(frozen=True)
class Shortest(Selector):
    """Keep the shortest members of each group among the right ones, and all others.

    The GRPO side of GFPO's idea of sampling more and training on the concise (Shrivastava et al. 2025, arXiv
    2508.09726), which filters all members by length: here `right_only: false`.
    """

    keep: int = 4
    """Number of members to keep."""
    right_only: bool = True
    """Only members with the group's highest reward compete; false: all decided members do."""
    smallest_group: ClassVar = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}: it must be at least 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        kept = []
        lengths = np.asarray([int(r.sampled.sum()) for r in batch.rollouts], dtype=np.int64)
        for order in ranked(batch, "reward"):
            if not len(order):
                continue
            if self.right_only:
                competing = rewards[order] == rewards[order].max()
            else:
                competing = np.ones(len(order), dtype=bool)
            # A stable sort by length keeps the order of `ranked` (member) among equally long ones.
            racers = order[competing]
            kept += [order[~competing], racers[np.argsort(lengths[racers], kind="stable")[: self.keep]]]
        return positions(kept)


def check_order(selector: Selector, name: str, select_after: bool) -> None:
    """ConfigError where a selector reads advantages that are not there yet."""
    if selector.after and not select_after:
        raise ConfigError(
            f"algorithm.select: {name!r} reads advantages, and selection comes before them: set "
            "algorithm.select_after=true"
        )


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
        by_source: dict[str | None, list[tuple[float, str, np.ndarray]]] = {}
        for group, rewards in decided_values(batch, "reward"):
            # Negative, so that an ascending sort puts the largest deviation first.
            entry = (-spread_of(rewards), group.key, group.index)
            by_source.setdefault(group.rollouts[0].task.source, []).append(entry)
        least = min(map(len, by_source.values()), default=0)
        keep = math.floor(self.most * least + ROUNDING)
        # Sorted without the positions: a sort cannot compare arrays.
        kept = [sorted(groups, key=lambda group: group[:2])[:keep] for groups in by_source.values()]
        return positions([index for groups in kept for *_, index in groups])


@register("selector", "balance_outcomes")
@dataclass(frozen=True)
class BalanceOutcomes(Selector):
    """Keep at most `most` times as many members of the commoner kind, right or wrong, as of the rarer, in each group.

    A member is right if its reward is above `threshold`, else wrong. Right members with the highest values of `column`
    and wrong members with the lowest ones stay; of equal values, the later member among the right ones and the earlier
    among the wrong ones. A group of one kind only has nothing to balance and keeps all of its members; the selector
    `mixed_groups` drops such groups. Undecided members are dropped from every group.

    With `remove` so many members of each group are dropped, whatever their kinds, so that those that stay are as many
    right as wrong ones where that can be: PROF (Ye et al. 2025, arXiv 2509.03403; amazon-science/PROF-GRPO, commit
    8164ec2, prof_grpo/prof_grpo_both/prof_ray_trainer.py, filter_trajectories).
    """

    most: float = 1.0
    """The largest number of members of the commoner kind, as a multiple of the rarer kind's; at least 1."""
    threshold: float = 0.5
    """Rewards above it are right."""
    remove: int | None = None
    """Members of each group to drop, at least 1, in the place of `most`; null: as `most` says."""
    column: str = "reward"
    """The column that members of a kind are ranked by: `reward`, or `reward/TERM` of a term."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most is {self.most}: it must be at least 1")
        if self.remove is not None and self.remove < 1:
            raise ValueError(f"remove is {self.remove}: it must be at least 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        kept = []
        for order in ranked(batch, self.column):
            order = order[np.isfinite(rewards[order])]
            is_right = rewards[order] > self.threshold
            # `ranked` gives positions in ascending order: the wrong members with the lowest values come first, and
            # after the reversal the right members with the highest.
            wrong = order[~is_right]
            right = order[is_right][::-1]
            if self.remove is not None:
                kept += self._without(right, wrong)
                continue
            # 0 if the group has one kind only.
            limit = math.floor(self.most * min(len(wrong), len(right)) + ROUNDING)
            kept += [order] if not limit else [wrong[:limit], right[:limit]]
        return positions(kept)

    def _without(self, right: np.ndarray, wrong: np.ndarray) -> list[np.ndarray]:
        """The members of both kinds that stay, of each the first ones."""
        assert self.remove is not None
        remove = min(self.remove, len(right) + len(wrong))
        # Half of what the right ones are more than the wrong ones, and of what is left to remove; a half goes to even.
        of_right = round((len(right) - len(wrong) + remove) / 2)
        of_right = min(max(of_right, 0), remove, len(right))
        of_wrong = min(remove - of_right, len(wrong))
        return [right[: len(right) - of_right], wrong[: len(wrong) - of_wrong]]
