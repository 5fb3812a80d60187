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
        return float(values.std())
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

    The dynamic filter of RLPR (Yu et al. 2025, arXiv 2506.18254, from notes): groups whose standard deviation is below
    `share` of its moving average over the steps before are dropped. On the first step all that have a spread stay.
    """

    share: float = 0.5
    """The bound as a share of the moving average; 0 keeps all groups with a decided reward."""
    decay: float = 0.99
    """Share of the moving average that stays at each step, 0 to below 1."""
    _average: float | None = field(default=None, init=False, repr=False)
    _new: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.share < 0 or not 0 <= self.decay < 1:
            raise ValueError("share must be at least 0, and decay 0 to below 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        keep = np.zeros(len(batch), dtype=bool)
        spreads = []
        for group, finite in decided_values(batch, "reward"):
            if len(finite):
                spread = spread_of(finite)
                spreads.append(spread)
                # Without an average yet (first step) the bound is 0 and groups of equal rewards are dropped by `spread
                # > 0`.
                keep[group.index] = spread >= self.share * (self._average or 0.0) and (spread > 0 or self.share == 0)
        # Waits for `observe`: a batch that is looked at and not trained does not move the average.
        self._new = float(np.mean(spreads)) if spreads else None
        return np.flatnonzero(keep)

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """The step was trained: its mean spread goes into the average."""
        if self._new is not None:
            # The first step's mean begins the average, which needs no correction for starting at 0 then.
            old = self._new if self._average is None else self._average
            self._average = self.decay * old + (1 - self.decay) * self._new
        self._new = None

    def state_dict(self) -> dict[str, Any]:
        """The moving average."""
        return {"average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the average of a checkpoint."""
        self._average = state["average"]
