"""Terms made of terms: sums, products, gates, vetoes, tiers, and one of two by the group's pass rate.

Invariants: each is a pure function of its parts' columns; undecided parts leave the whole undecided unless the others
decide it already (a closed gate, a veto, a factor of 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec


@register("reward", "sum")
@dataclass(frozen=True)
class Sum(RewardTerm):
    """The weighted sum of terms, for use inside another term (a gate, say)."""

    terms: tuple[TermSpec, ...] = ("verdict",)
    """The terms, each with an optional `weight`."""
    inner: ClassVar = ("terms",)

    def __post_init__(self) -> None:
        _some(self.terms)

    def __call__(self, batch: Batch, terms: list[np.ndarray]) -> np.ndarray:
        return np.sum(terms, axis=0)


@register("reward", "product")
@dataclass(frozen=True)
class Product(RewardTerm):
    """The product of terms; 0 where a factor is 0, undecided ones or not."""

    terms: tuple[TermSpec, ...] = ("verdict",)
    """The factors."""
    inner: ClassVar = ("terms",)

    def __post_init__(self) -> None:
        _some(self.terms)

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

    vetoes: tuple[TermSpec, ...] = ("format",)
    """The terms that may strike."""
    term: TermSpec = "verdict"
    """The term that is paid where no veto strikes."""
    below: Scalar = 1.0
    """A veto strikes below this."""
    value: Scalar = -1.0
    """The value that is paid where a veto strikes."""
    inner: ClassVar = ("term", "vetoes")

    def __post_init__(self) -> None:
        _some(self.vetoes)

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

    terms: tuple[TermSpec, ...] = ("verdict",)
    """The terms, most important first, each in [0, 1]."""
    inner: ClassVar = ("terms",)

    def __post_init__(self) -> None:
        _some(self.terms)

    def __call__(self, batch: Batch, terms: list[np.ndarray]) -> np.ndarray:
        result = np.zeros(len(batch))
        on = np.ones(len(batch), dtype=bool)
        for values in terms:
            result += np.where(on, np.clip(values, 0.0, 1.0), 0.0)
            # Not `values >= 1.0`: an undecided term (NaN) has to stay on, so that its NaN reaches the sum of this and
            # later terms.
            on &= ~(values < 1.0)
        return result / len(terms)


@register("reward", "by_pass_rate")
@dataclass(frozen=True)
class ByPassRate(RewardTerm):
    """One of two terms for each group, by its pass rate: `then` where it is high, `otherwise` elsewhere.

    The switch of GRPO-lambda (Dai et al. 2025, arXiv 2505.18086): a length penalty only where the group is right often
    enough, so that it does not make accuracy collapse. `top` is the paper's batch-relative form: the share of the
    batch's groups with the highest pass rates; ties at the border are all in. `top: 1` and `at_least: 0` are `then`
    alone.
    """

    then: TermSpec = "brevity"
    """The term of groups with a high pass rate."""
    otherwise: TermSpec = "verdict"
    """The term of the other groups."""
    of: TermSpec = "verdict"
    """The term whose mean over the decided members is the pass rate."""
    at_least: Scalar | None = None
    """The pass rate is high from here on; null with `top` given, else 0.5."""
    top: Scalar | None = None
    """In place of `at_least`: the share of the batch's groups whose pass rate counts as high, the highest first."""
    inner: ClassVar = ("then", "otherwise", "of")

    def __post_init__(self) -> None:
        if self.at_least is not None and self.top is not None:
            raise ValueError("`at_least` and `top` exclude each other: set one to null")

    def __call__(self, batch: Batch, then: np.ndarray, otherwise: np.ndarray, of: np.ndarray) -> np.ndarray:
        groups = batch.group_index()
        high = self._high(pass_rates(of, groups))
        if len(batch):
            return np.where(high[groups], then, otherwise)
        return np.zeros(0)

    def _high(self, rates: np.ndarray) -> np.ndarray:
        """bool [G], False for groups without a decided member."""
        # Pass rates of the groups, [G], highest first.
        decided = np.sort(rates[np.isfinite(rates)])[::-1]
        if self.top is None:
            return rates >= (0.5 if self.at_least is None else float(self.at_least))
        # The tolerance is for products such as 0.07 x 100 = 7.000000000000001, whose ceiling would be 8.
        count = int(np.ceil(float(self.top) * len(decided) - 1e-9))
        if count > 0:
            return rates >= decided[count - 1]
        return np.zeros(len(rates), dtype=bool)


def pass_rates(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """float64 [G]: the mean of each group's decided values; NaN where there is none."""
    on = np.isfinite(values)
    size = int(groups.max()) + 1 if len(groups) else 0
    count = np.bincount(groups[on], minlength=size)
    total = np.bincount(groups[on], values[on], minlength=size)
    # [G]; the maximum only avoids a division by zero in the groups that become NaN.
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


@register("reward", "by_condition")
@dataclass(frozen=True)
class ByCondition(RewardTerm):
    """A table of four: right or wrong, and whether a condition holds.

    AutoThink's base reward is {right: [1, 2], wrong: [0, -1]} with the condition that the response does not think (Tu
    et al. 2025, arXiv 2505.10832). `balance` penalises the more frequent side of the condition: with p the share of the
    batch where the condition holds, those with it lose balance x max(0, p - 0.5) x 2, those without it balance x max(0,
    0.5 - p) x 2, so that neither dies out.
    """

    condition: TermSpec = "format"
    """A term that is 1 where the condition holds, else 0."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    right: tuple[float, float] = (1.0, 1.0)
    """Value of a right answer without the condition, and with it."""
    wrong: tuple[float, float] = (0.0, 0.0)
    """Value of a wrong answer without the condition, and with it."""
    balance: Scalar = 0.0
    """The largest amount that is subtracted on the more frequent side."""
    inner: ClassVar = ("condition", "of")

    def __call__(self, batch: Batch, condition: np.ndarray, of: np.ndarray) -> np.ndarray:
        holds = (condition >= 1.0).astype(np.int64)
        # `holds` is 0 or 1 for each rollout, [B], and indexes the pair (without, with).
        right, wrong = (np.asarray(pair)[holds] for pair in (self.right, self.wrong))
        values = np.where(of >= 1.0, right, wrong)
        undecided = np.isnan(condition) | np.isnan(of)
        # p; 0.5 where nothing is decided, so that no side loses anything.
        share = holds[~undecided].mean() if (~undecided).any() else 0.5
        # From 0 at p = 0.5 to 1 at p = 0 or 1: the factor of 2 makes `balance` the largest penalty.
        excess = 2 * np.maximum(0.0, np.where(holds == 1, share - 0.5, 0.5 - share))
        return np.where(undecided, np.nan, values - float(self.balance) * excess)


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


def _some(terms: tuple[TermSpec, ...]) -> None:
    if not terms:
        raise ValueError("it needs at least one term")
