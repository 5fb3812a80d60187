"""Equality of expressions: identities are confirmed, and refuted, at fixed sample points at high precision.

A true identity holds at every point where both sides have a value; two different analytic expressions agree at ten
unrelated points only by a coincidence that the precision excludes. Constants are one point.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rlvr.verifiers.math.evaluate import DIGITS, MARGIN, Evaluator, Fuel, TooLarge, Unknown, Value
from rlvr.verifiers.math.expression import Apply, Node, Symbol, as_decimal, is_integer_literal, symbols, walk
from rlvr.verifiers.math.numeric import is_rounding

WHOLE = 4
"""Points of small positive integers, where factorials and binomials are exact."""
ENOUGH = 8
"""Points of agreement that need no more: numbers of both signs, large and small ones."""
FAR = frozenset({"abs", "max", "min", "floor", "ceil", "sgn", "mod"})
"""Operations that are one formula here and another one there: compared far away too."""


_ABS = frozenset({"abs"})


@dataclass
class Sampler:
    """Equality of expressions by sampling, with one supply of fuel; values are kept, so that lists compare fast."""

    log_base: int = 0
    tolerance: float = 0.0
    fuel: Fuel = field(default_factory=Fuel)
    _values: dict[tuple[int, int, int], Value] = field(default_factory=dict)
    _lost: set[tuple[int, int, int]] = field(default_factory=set)
    """Keys of values that do not show all parts of their expression."""
    _roughly: dict[int, complex | None] = field(default_factory=dict)
    _alive: list[Node] = field(default_factory=list)
    _has_symbols: dict[int, bool] = field(default_factory=dict)

    def value(self, node: Node, digits: int = DIGITS[0]) -> Value:
        """The value of an expression without free symbols; raises Unknown."""
        return self._at(node, -1, {}, digits)

    def differ(self, gold: Node, answer: Node) -> bool:
        """Whether two constants are clearly not the same; cheap for the same nodes again and again."""
        one, other = self._rough(gold), self._rough(answer)
        return one is not None and other is not None and abs(one - other) > 1e-6 * abs(one)

    def _rough(self, node: Node) -> complex | None:
        if id(node) not in self._roughly:
            self._alive.append(node)
            try:
                self._roughly[id(node)] = complex(self.value(node))
            except (Unknown, OverflowError):
                self._roughly[id(node)] = None
        return self._roughly[id(node)]

    def at(self, node: Node, point: dict[str, Fraction]) -> Value:
        """The value at one point; raises Unknown."""
        return Evaluator(point, self.fuel, DIGITS[0], self.log_base)(node)

    def equal(self, gold: Node, answer: Node, positive: bool = False) -> bool | None:
        """Whether two expressions have the same value wherever both have one; None where that cannot be told.

        With `positive` only positive values of the symbols count.
        """
        names = sorted(symbols(gold) | symbols(answer))
        if not names:
            return self._constants(gold, answer)
        is_complex = any(
            isinstance(node, Symbol) and node.name == "i" for side in (gold, answer) for node in walk(side)
        )
        strict = _has_any(_ABS, gold) != _has_any(_ABS, answer)
        agreed = agreed_off_axis = 0
        hidden: list[tuple[int, dict[str, Fraction]]] = []
        far = _has_any(FAR, gold) or _has_any(FAR, answer)
        for number, point in enumerate(_points(tuple(names), far)):
            if positive and min(point.values()) < 0:
                continue
            try:
                one, other = self._at(gold, number, point), self._at(answer, number, point)
            except TooLarge:
                if self.fuel.left < 0:
                    return None
                continue
            except Unknown:
                continue
            real = [_is_real(value) for value in (one, other)]
            if not is_complex and not all(real):
                if any(real) and strict:
                    return False
                agreed_off_axis += not any(real) and self._agree(gold, answer, number, point) is not False
                continue
            same = self._agree(gold, answer, number, point)
            if same is False:
                return False
            if same is None:
                hidden.append((number, point))
            agreed += same is True and _is_telling(one)
            if agreed == ENOUGH and not far:
                return True
        for number, point in hidden:
            if agreed >= 3:
                break
            same = self._agree(gold, answer, number, point, DIGITS)
            if same is False:
                return False
            agreed += same is True and _is_telling(self._at(gold, number, point))
        return True if agreed >= 3 or (agreed == 0 and agreed_off_axis >= 3) else None

    def _constants(self, gold: Node, answer: Node) -> bool | None:
        try:
            one = self.value(gold)
        except Unknown:
            return None
        try:
            other = self.value(answer)
        except TooLarge:
            return False if self.fuel.left > 0 else None
        except Unknown:
            return None
        if self.tolerance and abs(
            one - other if type(one) is type(other) else complex(one) - complex(other)
        ) <= self.tolerance * abs(one):
            return True
        if self._is_rounded(gold, answer) or self._is_rounded(answer, gold):
            return True
        same = self._agree(gold, answer, -1, {}, DIGITS)
        return None if same and not _is_telling(one) else same

    def _is_rounded(self, exact: Node, rounded: Node) -> bool:
        """Whether `rounded` is a decimal that is right for the real number `exact`, see numeric.is_rounding."""
        decimal, other = as_decimal(rounded), as_decimal(exact)
        if decimal is None or is_integer_literal(exact) or (other is not None and other.places <= decimal.places):
            return False
        digits = next((digits for digits in DIGITS if digits > decimal.places + 2 * MARGIN), DIGITS[-1])
        try:
            value = self.value(exact, digits)
        except Unknown:
            return False
        return _is_real(value) and is_rounding(value.real, decimal.value, decimal.places)

    def proportional(self, gold: Node, answer: Node, factors: Sequence[str] = ()) -> bool | None:
        """Whether one expression is a constant, not zero, times the other; None where too few points tell.

        Powers of the symbols in `factors` count as constants.
        """
        if factors and len(factors) <= 3:
            powers = itertools.product(range(-2, 3), repeat=len(factors))
            return any(self._proportional(gold, answer, dict(zip(factors, power, strict=True))) for power in powers)
        return self._proportional(gold, answer, {})

    def _proportional(self, gold: Node, answer: Node, powers: dict[str, int]) -> bool | None:
        """The lowest precision decides at which enough points show all parts of both."""
        for digits in DIGITS:
            pairs, hidden = self._pairs(gold, answer, powers, digits)
            if len(pairs) >= 4 or not hidden:
                break
        if len(pairs) < 4 or all(one == 0 for one, _ in pairs) or all(other == 0 for _, other in pairs):
            return None
        evaluator = Evaluator({}, self.fuel, digits)
        if not all(isinstance(value, Fraction) for pair in pairs for value in pair):
            pairs = [(evaluator.inexact(one), evaluator.inexact(other)) for one, other in pairs]
        scale = max(pairs, key=lambda pair: abs(pair[0]))
        crossed = [(a * scale[1], b * scale[0]) for a, b in pairs]
        if isinstance(scale[0], Fraction):
            return all(a == b for a, b in crossed)
        noise = evaluator.tiny * 10**MARGIN  # of a product of two inexact values
        return all(abs(a - b) <= noise * (abs(a) + abs(b)) for a, b in crossed)

    def _pairs(
        self, gold: Node, answer: Node, powers: dict[str, int], digits: int
    ) -> tuple[list[tuple[Value, Value]], int]:
        """The values at the points that show all parts of both, and how many points do not."""
        names, pairs, hidden = sorted(symbols(gold) | symbols(answer)), [], 0
        for number, point in enumerate(_points(tuple(names))):
            evaluator = Evaluator({}, self.fuel, digits)
            try:
                one, other = self._at(gold, number, point, digits), self._at(answer, number, point, digits)
            except Unknown:
                continue
            factor = functools.reduce(
                lambda a, b: a * b, (point[name] ** power for name, power in powers.items()), Fraction(1)
            )
            if not (isinstance(one, Fraction) and isinstance(other, Fraction)):
                one, other, factor = evaluator.inexact(one), evaluator.inexact(other), evaluator.inexact(factor)
            if evaluator.lost or self._is_lost(gold, number, digits) or self._is_lost(answer, number, digits):
                hidden += 1
            else:
                pairs.append((one, other * factor))
        return pairs, hidden

    def same_sign(self, gold: Node, answer: Node) -> bool | None:
        """Whether two proportional expressions have the same sign."""
        for number, point in enumerate(_points(tuple(sorted(symbols(gold))))):
            try:
                one, other = self._at(gold, number, point), self._at(answer, number, point)
            except Unknown:
                continue
            if _is_real(one) and _is_real(other) and one != 0 and other != 0:
                inexact = Evaluator({}, self.fuel).inexact
                return bool((inexact(one).real > 0) == (inexact(other).real > 0))
        return None

    def _at(self, node: Node, number: int, point: dict[str, Fraction], digits: int = DIGITS[0]) -> Value:
        key = self._key(node, number, digits)
        if key not in self._values:
            try:
                evaluate = Evaluator(point, self.fuel, digits, self.log_base)
                self._values[key] = evaluate(node)
                if evaluate.lost:
                    self._lost.add(key)
            except Unknown as unknown:
                self._values[key] = unknown
            except (ArithmeticError, ValueError, TypeError) as error:  # mpmath raises these outside a domain
                self._values[key] = Unknown(str(error))
        value = self._values[key]
        if isinstance(value, Unknown):
            raise value
        return value

    def _key(self, node: Node, number: int, digits: int) -> tuple[int, int, int]:
        if id(node) not in self._has_symbols:
            self._alive.append(node)  # its id is a key
            self._has_symbols[id(node)] = bool(symbols(node))
        return id(node), number if self._has_symbols[id(node)] else -1, digits

    def _agree(
        self, gold: Node, answer: Node, number: int, point: dict[str, Fraction], precisions: Sequence[int] = DIGITS[:2]
    ) -> bool | None:
        """Exact for fractions; else equal but for an error that shrinks with the precision. None where no precision shows
        all parts of both."""
        last = None
        for digits in precisions:
            evaluator = Evaluator({}, self.fuel, digits)
            one, other = self._at(gold, number, point, digits), self._at(answer, number, point, digits)
            if isinstance(one, Fraction) and isinstance(other, Fraction):
                return bool(one == other)
            one, other = evaluator.inexact(one), evaluator.inexact(other)
            difference, size = abs(one - other), max(abs(one), abs(other))
            shown = not (evaluator.lost or self._is_lost(gold, number, digits) or self._is_lost(answer, number, digits))
            if last is None:
                if difference > size * 1e-10 and difference > 1e-12:
                    return False
                if difference == 0 and shown:
                    return True
            elif difference > size * evaluator.tiny and difference > last * 1e-25:
                return False
            elif shown:
                return True
            last = difference
        return None

    def _is_lost(self, node: Node, number: int, digits: int) -> bool:
        """Whether the value there does not show all parts of its expression."""
        return self._key(node, number, digits) in self._lost


def _is_telling(value: Value) -> bool:
    """Whether two such values that agree are equal: of a huge rounded value the last digits are lost."""
    return isinstance(value, Fraction) or abs(value) < 1e30


def _is_real(value: Value) -> bool:
    return isinstance(value, Fraction) or abs(value.imag) <= abs(value) * 1e-20


def _has_any(heads: frozenset[str], node: Node) -> bool:
    return any(isinstance(below, Apply) and below.head in heads for below in walk(node))


def _points(names: tuple[str, ...], far: bool = False) -> tuple[dict[str, Fraction], ...]:
    """Where to compare: reals of both signs, positive reals, small positive integers, and near 1, where large powers
    differ; with `far` large numbers too. A name has its own values everywhere.
    """
    values = [_coordinates(name)[: None if far else -2] for name in names]
    return tuple(dict(zip(names, point, strict=True)) for point in zip(*values, strict=True))


@functools.lru_cache(maxsize=512)
def _coordinates(name: str) -> tuple[Fraction, ...]:
    rng = random.Random(zlib.crc32(name.encode()))

    def fraction(low: int, high: int) -> Fraction:
        return Fraction(2 * rng.randint(low, high) + 1, rng.choice([8, 10, 14, 22]))  # odd / even: no real root of -1

    mixed = [rng.choice([-1, 1]) * fraction(0, 24) for _ in range(4)]
    large = [fraction(11, 24) for _ in range(2)]
    small = [fraction(0, 3) for _ in range(2)]
    whole = [Fraction(rng.randint(1, 6)) for _ in range(WHOLE)]
    # x^50 and x^51, or e to these, are told apart neither near 0 nor far from 1.
    near_one = [1 + Fraction(rng.choice([-1, 1]), 2 * rng.randint(10, 30)) for _ in range(3)]
    far = [sign * Fraction(2 * rng.randint(10**3, 10**4) + 1, 2) for sign in (-1, 1)]
    return (*mixed, *large, *small, *whole, *near_one, *far)
