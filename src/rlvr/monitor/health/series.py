"""The series of a monitor: the values of its metrics at the steps of a stage, and what it finds in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

# Ten, since the median of fewer follows single batches. More would let a drift at the start of a stage become the base.
FIRST = 10
"""Steps at the start of a stage that later ones are compared with."""


class Entry(NamedTuple):
    """The values of a monitor's metrics at one step, in the order in which it declares them."""

    step: int
    values: tuple[float, ...]


class Series:
    """The first and the newest entries of a stage; `keep` newest are kept."""

    def __init__(self, keep: int) -> None:
        self.first: list[Entry] = []
        self.recent: deque[Entry] = deque(maxlen=keep)
        self.count = 0

    def add(self, entry: Entry) -> None:
        """Take in the next step."""
        if len(self.first) < FIRST:
            self.first.append(entry)
        self.recent.append(entry)
        self.count += 1

    def last(self, number: int) -> list[Entry]:
        """The newest `number` entries in order; fewer where there are fewer."""
        newest = [entry for entry, _ in zip(reversed(self.recent), range(number), strict=False)]
        return newest[::-1]


def middle(entries: Sequence[Entry], place: int = 0) -> float:
    """The median of the values at `place`."""
    return median(entry.values[place] for entry in entries)


@dataclass(frozen=True)
class Finding:
    """A finding of a monitor."""

    step: int
    """The step at which it was reported."""
    monitor: str
    since: int
    """The first step of what is wrong."""
    message: str
    """The description of the trouble."""
    advice: str
    """Changes to try."""
    mode: str = "warn"
    """`stop` where the run ends for it."""
    examples: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "examples": list(self.examples)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Finding:
        return cls(**{**row, "examples": tuple(row.get("examples", ()))})

    def __str__(self) -> str:
        if self.since >= self.step:
            since = ""
        else:
            since = f" (since step {self.since})"
        return f"{self.monitor}: {self.message}{since}. Try: {self.advice}"


@dataclass(frozen=True)
class Trouble:
    """An observation in a series: since which step, and the numbers that its message names."""

    since: int
    numbers: Mapping[str, float] = field(default_factory=dict)
