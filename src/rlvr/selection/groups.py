"""Selectors that keep or drop whole groups by their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvr.components import Selector
from rlvr.core.schedules import Scalar
from rlvr.records import Batch, Group
from rlvr.registry import register


def decided_values(batch: Batch, column: str) -> Iterator[tuple[Group, np.ndarray]]:
    """Each group with the values of its members in a column, without those that are unknown."""
    values = batch.column(column)
    for group in batch.groups():
        of_group = values[group.index]
        yield group, of_group[np.isfinite(of_group)]


def spread_of(values: np.ndarray) -> float:
    """The standard deviation of some numbers; exactly 0 of equal ones, whose rounded mean may differ from them."""
    if len(values) and values.min() < values.max():
        # Sorted, so that the last bit of the sum does not depend on the order of the rollouts.
        return float(np.sort(values).std())
    return 0.0


@register("selector", "mixed_groups")
def mixed_groups(batch: Batch) -> np.ndarray:
    """Keep the groups whose decided rewards differ: the others give no advantage under a group baseline.

    Unlike skipping them in the backward pass, which changes nothing but time, this takes them out of the loss's
    denominator (DAPO, Yu et al. 2025, section 3.2, without its dynamic sampling).
    """
    keep = np.zeros(len(batch), dtype=bool)
    for group, decided in decided_values(batch, "reward"):
        # Compared, not by a standard deviation: that of equal numbers may be a rounding error above 0.
        keep[group.index] = len(decided) > 0 and decided.min() < decided.max()
    return np.flatnonzero(keep)


@register("selector", "decided")
def decided(batch: Batch) -> np.ndarray:
    """Keep the rollouts whose reward is decided."""
    return np.flatnonzero(np.isfinite(batch.column("reward")))


@register("selector", "pass_rate_band")
@dataclass(frozen=True)
class PassRateBand(Selector):
    """Keep the groups whose mean reward lies in a band, ends included: neither too easy nor too hard.

    Groups without a decided reward are dropped. 0 and 1 keep all others, with rewards in [0, 1].
    """

    low: Scalar = 0.0
    """The lower end."""
    high: Scalar = 1.0
    """The upper end."""
    column: str = "reward"
    """The column that the mean is of: `reward`, or `reward/TERM`."""

    def __call__(self, batch: Batch) -> np.ndarray:
        keep = np.zeros(len(batch), dtype=bool)
        for group, finite in decided_values(batch, self.column):
            if len(finite):
                keep[group.index] = float(self.low) <= finite.mean() <= float(self.high)
        return np.flatnonzero(keep)


@register("selector", "spread")
@dataclass
class SpreadFilter(Selector):
    """Keep the groups whose rewards spread at least as much as is usual by now.

    The dynamic filter of RLPR (Yu et al. 2025, arXiv 2506.18254; OpenBMB/RLPR, commit 8490fca,
    verl/trainer/ppo/ray_trainer.py, `fit`): groups whose standard deviation is below `share` of its average over the
    steps before are dropped. The average is of all groups that were sampled, dropped ones among them. Without a step
    before it, the first step that filters keeps the groups that have a spread.
    """

    share: float = 0.5
    """The bound as a share of the average; 0 keeps all groups with a decided reward."""
    decay: float = 0.99
    """Share of the moving average that stays at each step, 0 to below 1."""
    average_from: int = 1
    """The first step, counted from 1, whose spreads the average holds."""
    filter_from: int = 1
    """The first step that drops groups, from `average_from` on. Until then the average is the plain mean of its steps
    that had a spread;
    it moves by `decay` from this step on."""
    _average: float | None = field(default=None, init=False, repr=False)
    _new: float | None = field(default=None, init=False, repr=False)
    _steps: int = field(default=0, init=False, repr=False)
    """Steps that were trained."""
    _measured: int = field(default=0, init=False, repr=False)
    """Steps that the plain mean is of."""

    def __post_init__(self) -> None:
        if self.share < 0 or not 0 <= self.decay < 1:
            raise ValueError("share must be at least 0, and decay 0 to below 1")
        if not 1 <= self.average_from <= self.filter_from:
            raise ValueError("steps are counted from 1, and average_from is not after filter_from")

    def sampled(self, batch: Batch) -> None:
        """Take in the spreads of the step, which go into the average once it is trained."""
        spreads = [spread_of(finite) for _, finite in decided_values(batch, "reward") if len(finite)]
        # Waits for `observe`: a batch that is looked at and not trained does not move the average.
        self._new = float(np.mean(spreads)) if spreads else None

    def __call__(self, batch: Batch) -> np.ndarray:
        if self._steps + 1 < self.filter_from:
            return np.arange(len(batch))
        keep = np.zeros(len(batch), dtype=bool)
        for group, finite in decided_values(batch, "reward"):
            if len(finite):
                spread = spread_of(finite)
                # Without an average yet the bound is 0 and groups of equal rewards are dropped by `spread > 0`.
                keep[group.index] = spread >= self.share * (self._average or 0.0) and (spread > 0 or self.share == 0)
        return np.flatnonzero(keep)

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """The step was trained: its mean spread goes into the average."""
        self._steps += 1
        if self._new is not None and self._steps >= self.average_from:
            # The first step's mean begins the average, which needs no correction for starting at 0 then.
            old = self._new if self._average is None else self._average
            if self._steps < self.filter_from:
                # A running mean: the n-th step with a spread moves it by 1 / n.
                self._measured += 1
                stays = 1 - 1 / self._measured
            else:
                stays = self.decay
            self._average = stays * old + (1 - stays) * self._new
        self._new = None

    def state_dict(self) -> dict[str, Any]:
        """The average, and the numbers of steps trained and of those that the running mean is of."""
        return {"average": self._average, "steps": self._steps, "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the average of a checkpoint."""
        self._average = state["average"]
        # Checkpoints of earlier versions, which filter from the first step, lack the key.
        self._steps = state.get("steps", 0)
        self._measured = state.get("measured", 0)
