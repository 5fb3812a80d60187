"""Changes by scoring anew, in counts and sums that add up from steps to a run.

Invariants: pure functions of two batches of the same rollouts; nothing is kept of a rollout but numbers; undecided is
never counted as wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np

from rlvr.monitor.batch import SAME
from rlvr.records import Batch, Verdict

FLIPS = ("right -> wrong", "wrong -> right", "-> undecided", "undecided ->", "other score")
"""Kinds of change of a verdict; right is a score of 1 or more, wrong any other score."""


def flip(before: Verdict | None, after: Verdict | None) -> str | None:
    """Return the one of `FLIPS` that a change of verdict is; None where the score is the same."""
    then = before.score if before else None
    now = after.score if after else None
    if then == now:
        return None
    # Before the comparison of scores: None has no order.
    if now is None or then is None:
        return FLIPS[2] if now is None else FLIPS[3]
    # Scores that differ on the same side of right: 0.2 and 0.7, or 1 and 2.
    if (then >= 1) == (now >= 1):
        return FLIPS[4]
    return FLIPS[0] if then >= 1 else FLIPS[1]


@dataclass
class ScoreChange:
    """Counts and sums over rollouts; of two sets of rollouts they add."""

    rollouts: int = 0
    flips: np.ndarray = field(default_factory=lambda: np.zeros(len(FLIPS), dtype=np.int64))
    """int64 [5]: how many verdicts changed, by `FLIPS`."""
    decided: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    """int64 [2]: rollouts with a reward, before and after."""
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """float64 [2]: the sum of their rewards."""
    groups: int = 0
    same: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))
    """int64 [2]: groups whose decided rewards are all the same, before and after."""
    compared: int = 0
    """Rollouts with an advantage before and after."""
    opposed: int = 0
    """Of these, those whose advantages have opposite signs."""
    moments: np.ndarray = field(default_factory=lambda: np.zeros(5))
    """float64 [5]: the sums of a, b, aa, bb and ab over the pairs of advantages."""

    def __add__(self, other: ScoreChange) -> ScoreChange:
        return ScoreChange(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def mean_rewards(self) -> list[float | None]:
        """Before and after."""
        pairs = zip(self.rewards.tolist(), self.decided.tolist(), strict=True)
        return [total / count if count else None for total, count in pairs]

    @property
    def correlation(self) -> float | None:
        """Pearson's, of the advantages before and after; None where one of them does not vary."""
        count = self.compared
        (a, b, aa, bb, ab) = self.moments.tolist()
        if not count:
            return None
        # var = E[a^2] - E[a]^2, which rounding may make negative.
        spread = max(0.0, aa / count - (a / count) ** 2), max(0.0, bb / count - (b / count) ** 2)
        # Advantages are of order 1: below this variance they are constant up to rounding, and the quotient would be
        # noise.
        if min(spread) < 1e-12:
            return None
        # Pearson: (E[ab] - E[a] E[b]) / sqrt(var a var b), from sums, so that steps add up without keeping a rollout.
        return float((ab / count - a * b / count**2) / math.sqrt(spread[0] * spread[1]))


def change(before: Batch, after: Batch, advantages: tuple[np.ndarray, np.ndarray]) -> ScoreChange:
    """Return the differences between two scorings of the same rollouts, both with the column `reward`."""
    verdicts = [flip(one.verdict, other.verdict) for one, other in zip(before.rollouts, after.rollouts, strict=True)]
    rewards = [before.column("reward"), after.column("reward")]
    a, b = advantages
    return ScoreChange(
        rollouts=len(before),
        flips=np.asarray([verdicts.count(kind) for kind in FLIPS]),
        decided=np.asarray([int(np.isfinite(values).sum()) for values in rewards]),
        rewards=np.asarray([float(np.nansum(values)) for values in rewards]),
        groups=sum(1 for _ in before.groups()),
        same=np.asarray([_same(before, values) for values in rewards]),
        compared=len(a),
        opposed=int((a * b < 0).sum()),
        moments=np.asarray([a.sum(), b.sum(), a @ a, b @ b, a @ b], dtype=np.float64),
    )


def _same(batch: Batch, reward: np.ndarray) -> int:
    """Groups whose decided rewards are all the same."""
    decided = [reward[group.index][np.isfinite(reward[group.index])] for group in batch.groups()]
    return sum(bool(len(values)) and bool(np.ptp(values) < SAME) for values in decided)
