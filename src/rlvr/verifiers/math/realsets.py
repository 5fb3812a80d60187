r"""Sets of real numbers: intervals, unions, complements, inequalities in one variable, set-builder; one canonical form.

A set is a sorted list of disjoint intervals; ends are compared by value, so `x \ge 2`, `2 \leq x` and `[2, \infty)` are
one set.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rlvr.verifiers.math.expression import COMPARED, FLIPPED, INEQUALITIES, is_literal, symbols, walk
from rlvr.verifiers.math.guarded_arithmetic import UnknownValueError
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Builder, Listing, Node, Number, Relation, Symbol
from rlvr.verifiers.math.plain_form import plain
from rlvr.verifiers.math.point_sampling import PointSampler

_ZERO = Number(Fraction(0))
_INFINITY = Symbol("infinity")


class NotASetError(Exception):
    """The node is no set of reals that is understood here."""


@dataclass(frozen=True)
class End:
    """An end of a interval: `side` is -1 or 1 where the value is infinite, else 0."""

    node: Node
    value: Any
    side: int = 0
    closed: bool = False


@dataclass(frozen=True)
class Interval:
    """An interval, or a point where both ends are the same and closed."""

    low: End
    high: End


Set = tuple[Interval, ...]


def _closes_infinity(node: Node) -> bool:
    r"""Return True if an interval has a square bracket at infinity, which no set of reals contains: `[0, \infty]`."""
    infinite = (_INFINITY, Apply("neg", (_INFINITY,)))
    return any(
        (below.opening == "[" and below.items[0] in infinite) or (below.closing == "]" and below.items[1] in infinite)
        for below in walk(node)
        if isinstance(below, Bracket) and len(below.items) == 2
    )


def _letters(node: Node) -> frozenset[str]:
    """The letters that the inequalities of a node are about."""
    inequalities = [
        below for below in walk(node) if isinstance(below, Relation) and set(below.operators) & INEQUALITIES
    ]
    return frozenset[str]().union(*map(symbols, inequalities))


class RealSets:
    """Reads nodes as sets of reals; `sampler` gives the values of their ends."""

    def __init__(self, sampler: PointSampler, simplified: bool) -> None:
        self.sampler = sampler
        self.simplified = simplified

    def same(self, gold: Node, answer: Node) -> bool | None:
        """Return True if two nodes are the same set; None if one is not understood as one."""
        try:
            if len(_letters(gold)) > 1 or len(_letters(answer)) > 1:  # `x > 2, y > 1` is no set of reals
                return None
            if _closes_infinity(answer) and not _closes_infinity(gold):
                return False
            one = self.read(gold)
            other = self.read(answer)
            if len(one) != len(other):
                return False
            return all(
                self._same_end(a.low, b.low) and self._same_end(a.high, b.high) for a, b in zip(one, other, strict=True)
            )
        except (NotASetError, UnknownValueError):
            return None

    def read(self, node: Node) -> Set:
        """The set in canonical form; raises NotASetError or Unknown."""
        node = plain(node)
        match node:
            case Symbol("Reals"):
                return (Interval(self._infinite(-1), self._infinite(1)),)
            case Symbol("Reals +" | "Reals -" | "Reals *" as name):
                below = Interval(self._infinite(-1), self._end(_ZERO, False))
                above = Interval(self._end(_ZERO, False), self._infinite(1))
                return {"+": (above,), "-": (below,), "*": (below, above)}[name[-1]]
            case Symbol("emptyset") | Bracket("{", "}", ()):
                return ()
            case Bracket("{", "}", (Builder(subject, conditions),)):
                return self._builder(subject, conditions)
            # `\{1, 2\}`: points are intervals with two equal closed ends.
            case Bracket("{", "}", items):
                return self._union([(Interval(self._end(item, True), self._end(item, True)),) for item in items])
            case Bracket(opening, closing, (low, high)) if opening in "([]" and closing in ")][":
                return self._interval(low, opening == "[", high, closing == "]")
            case Bracket("(", ")", (inner,)):
                return self.read(inner)
            case Apply("cup" | "vee", parts) | Listing("or", parts):
                return self._union([self.read(part) for part in parts])
            case Apply("cap" | "wedge", parts) | Listing("and", parts):
                return self._intersection([self.read(part) for part in parts])
            # `\mathbb{R} - \{0\}` is written with a minus sign.
            case Apply("minus", (whole, part)) | Apply("+", (Symbol("Reals") as whole, Apply("neg", (part,)))):
                return self._intersection([self.read(whole), self._complement(self.read(part))])
            case Relation():
                return self._relation(node)
            case Listing(",", parts):
                sets = [self.read(part) for part in parts]
                # `x > 2, x < 5` is an intersection; `x < 2, x > 5` has an empty one and is meant as a union.
                if all(isinstance(part, Relation) and len(symbols(part)) == 1 for part in parts):
                    return self._intersection(sets) or self._union(sets)
                return self._union(sets)
        raise NotASetError

    # intervals

    def _infinite(self, side: int) -> End:
        return End(_INFINITY, None, side)

    def _end(self, node: Node, closed: bool) -> End:
        match node:
            case Symbol("infinity"):
                return self._infinite(1)
            case Apply("neg", (Symbol("infinity"),)):
                return self._infinite(-1)
        if symbols(node):
            raise NotASetError
        value = self.sampler.value(node)
        if value.imag != 0:
            raise NotASetError
        return End(node, value, 0, closed)

    def _interval(self, low: Node, low_closed: bool, high: Node, high_closed: bool) -> Set:
        start = self._end(low, low_closed)
        stop = self._end(high, high_closed)
        order = self._compare(start, stop)
        if order > 0 or start.side > 0 or stop.side < 0:
            raise NotASetError
        if order < 0 or (low_closed and high_closed):
            return (Interval(start, stop),)
        return ()

    def _compare(self, one: End, other: End) -> int:
        if one.side or other.side:
            return (one.side > other.side) - (one.side < other.side)
        a = one.value
        b = other.value
        if type(a) is not type(b):
            a, b = (float(value) if isinstance(value, Fraction) else value for value in (a, b))
        # A first look: nearer ends are compared exactly by the sampler, since `[1, \sqrt{1}]` is one point.
        near = Fraction(1, 10**12) if isinstance(a, Fraction) else 1e-12
        if abs(a - b) <= abs(a) * near and self.sampler.equal(one.node, other.node):
            return 0
        return (a > b) - (a < b)

    def _same_end(self, gold: End, answer: End) -> bool:
        if gold.side != answer.side or gold.closed != answer.closed:
            return False
        if gold.side:
            return True
        if self.simplified and is_literal(gold.node) and not is_literal(answer.node):
            return False
        return bool(self.sampler.equal(gold.node, answer.node))

    def _union(self, sets: list[Set]) -> Set:
        intervals = sorted((interval for one in sets for interval in one), key=_by_start)
        merged: list[Interval] = []
        for interval in intervals:
            if merged:
                last = merged[-1]
                gap = self._compare(last.high, interval.low)
                # `[0, 1) \cup [1, 2]` is one interval, `[0, 1) \cup (1, 2]` is not.
                if gap > 0 or (gap == 0 and (last.high.closed or interval.low.closed)):
                    order = self._compare(last.high, interval.high)
                    high = last.high if order > 0 or (order == 0 and last.high.closed) else interval.high
                    low = last.low
                    if self._compare(last.low, interval.low) == 0 and interval.low.closed:
                        low = interval.low
                    merged[-1] = Interval(low, high)
                    continue
            merged.append(interval)
        return tuple(merged)

    def _complement(self, one: Set) -> Set:
        intervals = []
        low = self._infinite(-1)
        for interval in one:
            if not interval.low.side:
                intervals.append(Interval(low, End(interval.low.node, interval.low.value, 0, not interval.low.closed)))
            low = End(interval.high.node, interval.high.value, interval.high.side, not interval.high.closed)
        if low.side <= 0:
            intervals.append(Interval(low, self._infinite(1)))
        return tuple(
            interval
            for interval in intervals
            if self._compare(interval.low, interval.high) or (interval.low.closed and interval.high.closed)
        )

    def _intersection(self, sets: list[Set]) -> Set:
        # De Morgan: A and B is the complement of (not A or not B), so that only unions and complements are implemented.
        return self._complement(self._union([self._complement(one) for one in sets]))

    # relations

    def _relation(self, node: Relation) -> Set:
        if "in" in node.operators:
            if node.operators[-1] != "in" or len(symbols(node.sides[0])) != 1:
                raise NotASetError
            return self.read(node.sides[-1])
        if not set(node.operators) <= COMPARED or node.operators == ("=",):
            raise NotASetError
        sides = itertools.pairwise(node.sides)
        parts = [self._one(left, sign, right) for sign, (left, right) in zip(node.operators, sides, strict=True)]
        return self._intersection(parts)

    def _one(self, left: Node, operator: str, right: Node) -> Set:
        """One relation, linear in its variable: `-x > -1`; or in its absolute value: `|x| < 2`."""
        names = symbols(left) | symbols(right)
        if not names:
            raise NotASetError
        left_names = symbols(left)
        right_names = symbols(right)
        # `2x > x + 3`: the variable on both sides is brought to the left.
        if left_names and right_names:
            left = Apply("+", (left, Apply("neg", (right,))))
            right = Number(Fraction(0))
        # `2 < x` is `x > 2`.
        elif right_names:
            left, operator, right = right, FLIPPED[operator], left
        if isinstance(left, Apply) and left.head == "abs":
            return self._absolute(left.args[0], operator, right)
        if isinstance(left, Symbol) or (isinstance(left, Apply) and left.head.startswith("call ")) or _is_call(left):
            return self._ray(operator, right)
        slope, start = self._linear(left, names)
        end: Node = Apply("/", (Apply("+", (right, Apply("neg", (start,)))), slope))
        if not symbols(right) and isinstance(bound := self.sampler.value(right), Fraction):
            end = Number((bound - start.value) / slope.value)
        return self._ray(operator if self.sampler.value(slope) > 0 else FLIPPED[operator], end)

    def _ray(self, operator: str, node: Node) -> Set:
        end = self._end(node, operator in ("<=", ">=", "=", "!="))
        low = self._infinite(-1)
        high = self._infinite(1)
        match operator:
            case "<" | "<=":
                return (Interval(low, end),) if end.side >= 0 else ()
            case ">" | ">=":
                return (Interval(end, high),) if end.side <= 0 else ()
            case "!=":
                return self._complement((Interval(end, end),))
        return (Interval(end, end),)

    def _absolute(self, inner: Node, operator: str, bound: Node) -> Set:
        match bound:
            case Apply("neg", (positive,)):
                minus = positive
            case Number(value):
                minus = Number(-value)
            case _:
                minus = Apply("neg", (bound,))
        if operator in ("=", "!="):
            raise NotASetError
        sides = [self._one(inner, operator, bound), self._one(inner, FLIPPED[operator], minus)]
        if operator in ("<", "<="):
            return self._intersection(sides)
        return self._union(sides)

    def _linear(self, node: Node, names: frozenset[str]) -> tuple[Number, Number]:
        """slope and value at 0 of an expression that is linear in its one symbol; exact, or NotASetError."""
        if len(names) != 1:
            raise NotASetError
        (name,) = names
        # Two values fix a line; three more confirm that the expression is one.
        values = [self.sampler.at(node, {name: Fraction(x)}) for x in (0, 1, 2, 5, Fraction(-7, 3))]
        if not all(isinstance(value, Fraction) for value in values):
            raise NotASetError
        start = values[0]
        slope = values[1] - values[0]
        if slope == 0 or [start + slope * x for x in (0, 1, 2, 5, Fraction(-7, 3))] != values:
            raise NotASetError
        return Number(slope), Number(start)

    def _builder(self, subject: Node, conditions: tuple[Node, ...]) -> Set:
        sets = [self.read(subject)] if isinstance(subject, Relation) else []
        names = symbols(subject.sides[0] if isinstance(subject, Relation) else subject)
        if len(names) != 1 or any(
            symbols(condition) != names | (symbols(condition) & {"Reals"}) for condition in conditions
        ):
            raise NotASetError
        return self._intersection([*sets, *(self.read(condition) for condition in conditions)])


def _is_call(node: Node) -> bool:
    """`P(x)`: read as a product of a letter and a bracket."""
    match node:
        case Apply("*", (Symbol(), Bracket(items=(Symbol(), *_)))):
            return True
    return False


def _by_start(interval: Interval) -> tuple[int, float, bool]:
    return (interval.low.side, float(interval.low.value) if not interval.low.side else 0.0, not interval.low.closed)
