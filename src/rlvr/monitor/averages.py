"""Weighted means and maxima gathered over micro-batches, optimizer steps and ranks.

Invariants:
- What is kept is (sum, weight) per name, so the mean does not depend on how the work was cut into pieces.
- A name that ends in `/max` or `_max` keeps the largest value instead; a NaN stays a NaN, for it is news.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class Averages:
    """Means by name. `add` a sum and the weight it is over; `means` gives sum / weight of all that was added."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add `total`, a sum over `weight` things (tokens, say), to `name`; for a maximum, `total` is a value.

        A weight of 0 says that there was nothing to measure. ValueError when it is negative.
        """
        total, weight = float(total), float(weight)
        if weight < 0:
            raise ValueError(f"the weight of {name!r} must not be negative: {weight}")
        before, seen = self._pairs.get(name, (0.0, 0.0))
        if is_maximum(name):
            total = _largest([x for x, w in ((before, seen), (total, weight)) if w > 0])
        else:
            total += before
        self._pairs[name] = (total, seen + weight)

    def update(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        """Add many (sum, weight) pairs: those of one micro-batch, or what `pairs` gave on another rank."""
        for name, (total, weight) in pairs.items():
            self.add(name, total, weight)

    def pairs(self) -> dict[str, tuple[float, float]]:
        """What was gathered, to be sent to another rank."""
        return dict(self._pairs)

    def means(self) -> dict[str, float | None]:
        """The mean (or maximum) of each name; None where the weights sum to 0."""
        return {
            name: None if not weight else total if is_maximum(name) else total / weight
            for name, (total, weight) in self._pairs.items()
        }


def is_maximum(name: str) -> bool:
    """Whether values called `name` are combined by their maximum rather than their mean."""
    return name.endswith(("/max", "_max"))


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
