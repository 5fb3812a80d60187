"""Terms made of terms: sums, products, gates, vetoes, tiers, bounds.

Invariants: each is a pure function of its parts' columns; undecided parts leave the whole undecided unless the others
decide it already (a closed gate, a veto, a factor of 0). Made of a term that scores spans, each scores these spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator

from rlvr.components import RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec


def _some(terms: tuple[Any, ...]) -> tuple[Any, ...]:
    if not terms:
        raise ValueError("it needs at least one term")
    return terms


Terms = Annotated[tuple[TermSpec, ...], AfterValidator(_some)]
"""The type of an option that holds terms as written."""


@register("reward", "sum")
@dataclass(frozen=True)
class Sum(RewardTerm):
    """The weighted sum of terms, for use inside another term (a gate, say)."""

    terms: Terms = ("verdict",)
    """The terms, each with an optional `weight`."""
    inner: ClassVar = ("terms",)
    by_element: ClassVar = True

    def __call__(self, batch: Batch, terms: list[np.ndarray]) -> np.ndarray:
        return np.sum(terms, axis=0)


@register("reward", "product")
@dataclass(frozen=True)
class Product(RewardTerm):
    """The product of terms; 0 where a factor is 0, undecided ones or not."""

    terms: Terms = ("verdict",)
    """The factors."""
    inner: ClassVar = ("terms",)
    by_element: ClassVar = True

    def __call__(self, batch: Batch, terms: list[np.ndarray]) -> np.ndarray:
        # 0 x NaN is NaN in numpy, but a factor of 0 decides the product whatever the undecided factor would be.
        zero = np.any([values == 0 for values in terms], axis=0)
        return np.where(zero, 0.0, np.prod(terms, axis=0))


@register("reward", "gate")
@dataclass(frozen=True)
class Gate(RewardTerm):
    """A term where another one reaches a value, and a constant elsewhere.

    `by: {name: format}` pays for an answer only in the right form; with `below` it is a penalty that wrong answers
    alone have. Undecided where the gate is, or where the term behind an open gate is.
    """

    term: TermSpec = "verdict"
    """The term that is paid where the gate is open."""
    by: TermSpec = "format"
    """The term that opens the gate."""
    at_least: Scalar = 1.0
    """The gate is open where `by` is at least this."""
    below: bool = False
    """Open it where `by` is below that value instead."""
    otherwise: Scalar = 0.0
    """The value that is paid where the gate is closed."""
    inner: ClassVar = ("term", "by")
    by_element: ClassVar = True

    def __call__(self, batch: Batch, term: np.ndarray, by: np.ndarray) -> np.ndarray:
        # NaN >= x is False, so an undecided gate looks closed here; the last line makes it undecided.
        reached = by >= float(self.at_least)
        values = np.where(reached != self.below, term, float(self.otherwise))
        return np.where(np.isnan(by), np.nan, values)


@register("reward", "veto")
@dataclass(frozen=True)
class Veto(RewardTerm):
    """A term, unless one of several others is below a value: then a fixed number, whatever the term says.

    The first veto that strikes decides, undecided ones or not; without one, an undecided veto leaves the rollout
    undecided.
    """

    vetoes: Terms = ("format",)
    """The terms that may strike."""
    term: TermSpec = "verdict"
    """The term that is paid where no veto strikes."""
    below: Scalar = 1.0
    """A veto strikes below this."""
    value: Scalar = -1.0
    """The value that is paid where a veto strikes."""
    inner: ClassVar = ("term", "vetoes")
    by_element: ClassVar = True

    def __call__(self, batch: Batch, term: np.ndarray, vetoes: list[np.ndarray]) -> np.ndarray:
        # NaN < x is False: an undecided veto never strikes.
        struck = np.any([values < float(self.below) for values in vetoes], axis=0)
        undecided = np.any([np.isnan(values) for values in vetoes], axis=0)
        return np.where(struck, float(self.value), np.where(undecided, np.nan, term))


@register("reward", "tiers")
@dataclass(frozen=True)
class Tiers(RewardTerm):
    """Lexicographic: each term counts only where all terms before it are at their full value.

    With n terms in [0, 1] the value is (full terms before the first that is not + that term's own value) / n, so no
    amount of a later term makes up for an earlier one. Terms past the first that is not full have no effect,
    undecided or not.
    """

    terms: Terms = ("verdict",)
    """The terms, most important first, each in [0, 1]."""
    inner: ClassVar = ("terms",)
    by_element: ClassVar = True

    def __call__(self, batch: Batch, terms: list[np.ndarray]) -> np.ndarray:
        result = np.zeros(len(batch))
        on = np.ones(len(batch), dtype=bool)
        for values in terms:
            result += np.where(on, np.clip(values, 0.0, 1.0), 0.0)
            # Not `values >= 1.0`: an undecided term (NaN) has to stay on, so that its NaN reaches the sum of this and
            # later terms.
            on &= ~(values < 1.0)
        return result / len(terms)


def pass_rates(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """float64 [G]: the mean of each group's decided values; NaN where there is none."""
    on = np.isfinite(values)
    size = int(groups.max()) + 1 if len(groups) else 0
    count = np.bincount(groups[on], minlength=size)
    total = np.bincount(groups[on], values[on], minlength=size)
    # [G]; the maximum only avoids a division by zero in the groups that become NaN.
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


Squash = Literal["none", "clip", "sigmoid", "tanh"]


@register("reward", "bounded")
@dataclass(frozen=True)
class Bounded(RewardTerm):
    """A term that is centred, then bounded, so that an unbounded score cannot be driven up for ever.

    PAR, preference as reward (Fu et al. 2025, arXiv 2502.18770): sigmoid(r - r_ref), which takes r_ref from responses
    of the reference policy; here `centre: peers` takes the mean over the group's other members, sigmoid(r_i - r_j), or
    a number is subtracted. `clip` and `tanh` saturate: scale x tanh(r / scale). `centre: 0`, `squash: none` change
    nothing.
    """

    term: TermSpec = "verdict"
    """The term that is bounded."""
    centre: Literal["peers"] | Scalar = 0.0
    """peers: each other decided member of the group in turn, and the mean is taken after bounding (a member without
    peers is compared with itself); a number: that constant."""
    squash: Squash = "sigmoid"
    """sigmoid: to (0, 1); tanh: to (-scale, scale); clip: to [low, high]; none."""
    scale: float = 1.0
    """Differences are divided by this before sigmoid or tanh; above 0."""
    low: float = -1.0
    """The lower bound of clip."""
    high: float = 1.0
    """The upper bound of clip."""
    inner: ClassVar = ("term",)

    def __post_init__(self) -> None:
        if not self.scale > 0 or self.low >= self.high:
            raise ValueError("scale must be above 0, and low below high")

    @property
    def by_element(self) -> bool:
        """True unless peers are compared."""
        return self.centre != "peers"

    def __call__(self, batch: Batch, term: np.ndarray) -> np.ndarray:
        if self.centre != "peers":
            return self._squashed(term - float(self.centre))
        result = np.full(len(batch), np.nan)
        for group in batch.groups():
            index = group.index[np.isfinite(term[group.index])]
            # [n, n] of a group's n decided members: entry (i, j) is squash(r_i - r_j). PAR's mean over reference
            # responses, with the other members in their place.
            against = self._squashed(term[index][:, None] - term[index][None, :])
            own = np.diag(against).copy()
            peers = len(index) - 1
            if peers > 0:
                # The diagonal squash(0) is subtracted: no member is its own peer.
                result[index] = (against.sum(axis=1) - own) / peers
            else:
                result[index] = own
        return result

    def _squashed(self, values: np.ndarray) -> np.ndarray:
        if self.squash == "sigmoid":
            # sigmoid(x) = (1 + tanh(x / 2)) / 2, which does not overflow for large negative x as exp(-x) does.
            return 0.5 * (1 + np.tanh(values / self.scale / 2))
        if self.squash == "tanh":
            return self.scale * np.tanh(values / self.scale)
        if self.squash == "clip":
            return np.clip(values, self.low, self.high)
        return values
