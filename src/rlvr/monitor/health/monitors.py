"""The kinds of monitor. Each is a pure function of a series of the metrics that it declares (`reads`).

Thresholds are meant to be passed only by runs that somebody should look at; where a healthy run can pass one (few
distinct answers of a policy that has solved its tasks), a second metric is read that tells the two apart.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Monitor(ABC):
    """One cause of trouble."""

    name: str
    reads: tuple[str, ...]
    """The metrics that it looks at."""
    message: str
    """The description of the trouble; `{name}` stands for a number that `look` found."""
    advice: str
    # Three times the longest window of the kinds below (2 * FIRST steps).
    keep: int = 64
    """Number of newest steps that the monitor can look back on."""
    examples: str | None = None
    """The verdict status that its examples have, where it shows completions."""

    def entry(self, row: Mapping[str, Any]) -> tuple[float, ...] | None:
        """Return a step's values of the metrics, or None where one of them was not computed."""
        values = tuple(row.get(name) for name in self.reads)
        return None if None in values else values  # type: ignore[return-value]

    @abstractmethod
    def look(self, series: Series) -> Trouble | None:
        """Return the trouble after the newest step; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Sustained(Monitor):
    """The same trouble at each of the last `steps` steps; `{value}` is the mean of the first metric over them."""

    bad: Callable[..., bool]
    steps: int = 5

    def look(self, series: Series) -> Trouble | None:
        """Return the trouble where the newest `steps` steps are all bad; it began at the first of them."""
        entries = series.last(self.steps)
        if len(entries) < self.steps or not all(self.bad(*entry.values) for entry in entries):
            return None
        return Trouble(entries[0].step, {"value": sum(e.values[0] for e in entries) / len(entries)})


@dataclass(frozen=True, kw_only=True)
class Drift(Monitor):
    """The first metric has moved away from where the stage began: `bad(start, now, others now ...)` of the medians of
    the first and the last ten steps. `{start}` and `{value}` are the two."""

    bad: Callable[..., bool]
    versus_others: bool = False
    """True if `bad` also gets the start and now of the second metric."""

    def look(self, series: Series) -> Trouble | None:
        """Compare the last ten steps with the first ten, once they do not overlap."""
        if series.count < 2 * FIRST:
            return None
        # Medians, so that one step with an outlier in it does not make a drift.
        now = series.last(FIRST)
        numbers = [middle(series.first), middle(now)]
        for place in range(1, len(self.reads)):
            if self.versus_others:
                numbers.append(middle(series.first, place))
            numbers.append(middle(now, place))
        if not self.bad(*numbers):
            return None
        return Trouble(now[0].step, {"start": numbers[0], "value": numbers[1]})


@dataclass(frozen=True, kw_only=True)
class Jump(Monitor):
    """The median of the last three steps is more than `factor` times that of the ten before them."""

    factor: float

    def look(self, series: Series) -> Trouble | None:
        """Compare what is newest with what was just before it."""
        # Three new steps: their median needs two of them to be high, so that one long batch is no jump.
        entries = series.last(FIRST + 3)
        if len(entries) < FIRST + 3:
            return None
        before = middle(entries[:FIRST])
        now = middle(entries[FIRST:])
        # `before` is 0 where a stage begins with empty completions; any length would then be a jump.
        if not now > self.factor * before > 0:
            return None
        since = next(entry.step for entry in entries[FIRST:] if entry.values[0] > self.factor * before)
        return Trouble(since, {"start": before, "value": now})


@dataclass(frozen=True, kw_only=True)
class Spikes(Monitor):
    """`times` among the last twenty steps are more than `factor` times their median."""

    factor: float = 10.0
    times: int = 3

    def look(self, series: Series) -> Trouble | None:
        """Count the steps that stand out."""
        entries = series.last(2 * FIRST)
        if len(entries) < 2 * FIRST:
            return None
        # The median of all 20, the high ones included: 3 of 20 do not move it.
        usual = middle(entries)
        high = [entry for entry in entries if entry.values[0] > self.factor * usual > 0]
        if len(high) < self.times:
            return None
        return Trouble(high[0].step, {"times": len(high), "value": max(e.values[0] for e in high), "start": usual})


@dataclass(frozen=True, kw_only=True)
class PartingMonitor(Monitor):
    """Reward and held-out score part: the newest evaluation is below the best one of the stage by more than chance
    (three standard errors of a score of that many tasks, at least 0.03), and the reward is above what it was then.

    The held-out score is the first of `scores` that the run has.
    """

    # Greedy first, since it has no noise from sampling.
    scores: tuple[str, ...] = ("eval/greedy", "eval/mean", "eval/pass@1")
    # Evaluations may be hundreds of steps apart, and the best one has to be still there: 2048 steps of three numbers
    # are small.
    keep: int = 2048
    around: int = 5
    """Steps before an evaluation whose rewards are averaged."""

    def entry(self, row: Mapping[str, Any]) -> tuple[float, ...] | None:
        """Reward, held-out score (NaN at steps without one), its tasks."""
        reward = row.get("reward/mean")
        if reward is None:
            return None
        score = next((row[name] for name in self.scores if row.get(name) is not None), math.nan)
        return float(reward), float(score), float(row.get("eval/tasks") or 1)

    def look(self, series: Series) -> Trouble | None:
        """Compare the newest step, where it was evaluated, with the best evaluation."""
        if math.isnan(series.recent[-1].values[1]):
            return None
        entries = list(series.recent)
        evaluated = [place for place, entry in enumerate(entries) if not math.isnan(entry.values[1])]
        best = max(evaluated, key=lambda place: entries[place].values[1])
        (_, score, tasks) = entries[-1].values
        (_, top, _) = entries[best].values
        # Standard error of the difference of two shares p, q of n tasks each, taken as independent:
        # sqrt((p (1 - p) + q (1 - q)) / n). Three of them and not two, since the best of many evaluations is above its
        # expectation. Scores outside of [0, 1] are no shares, and only the fixed bound of 0.03 holds for them.
        chance = 0.0
        if 0 <= score <= top <= 1:
            chance = 3 * math.sqrt((score * (1 - score) + top * (1 - top)) / tasks)
        before = self._reward(entries, best)
        now = self._reward(entries, len(entries) - 1)
        # 0.02 of reward: as in `length_drift`, less than that is noise.
        if top - score <= max(0.03, chance) or now - before < 0.02:
            return None
        return Trouble(entries[best].step, {"top": top, "value": score, "before": before, "now": now})

    def _reward(self, entries: list[Entry], place: int) -> float:
        rewards = [entry.values[0] for entry in entries[max(0, place + 1 - self.around) : place + 1]]
        return sum(rewards) / len(rewards)


@dataclass(frozen=True, kw_only=True)
class Dominating(Sustained):
    """A term other than the verdict explains nearly all of the reward's differences within groups, over some steps,
    while there are other terms (`explained/*`). `bad` gets what `entry` gives."""

    named: tuple[str, ...] = ("verdict",)
    """Terms that may dominate."""

    def entry(self, row: Mapping[str, Any]) -> tuple[float, ...] | None:
        """The largest share among the terms that should not dominate, and that of those that may."""
        shares = {name.removeprefix("explained/"): v for name, v in row.items() if name.startswith("explained/")}
        decided = {name: value for name, value in shares.items() if value is not None}
        others = [value for name, value in decided.items() if name not in self.named]
        if others:
            return (max(others), max((decided.get(name, 0.0) for name in self.named), default=0.0))
        return None


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
