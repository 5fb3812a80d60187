"""Equality of expressions: identities are confirmed, and refuted, at fixed sample points at high precision.

A true identity holds at every point where both sides have a value; two different analytic expressions agree at ten
unrelated points only by a coincidence that the precision excludes. Constants are one point.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rlvr.verifiers.math import matrices
from rlvr.verifiers.math.evaluation import NumericEvaluator
from rlvr.verifiers.math.expression import as_decimal, is_integer_literal, symbols, walk
from rlvr.verifiers.math.guarded_arithmetic import DIGITS, MARGIN, Fuel, TooLargeError, UnknownValueError, Value
from rlvr.verifiers.math.node_kinds import Apply, Node, Number, Symbol
from rlvr.verifiers.math.numeric import is_rounding
from rlvr.verifiers.math.points import (
    Point,
    has_any,
    has_domain_at,
    is_positive_point,
    is_real_point,
    needs_all_points,
    points,
)

ENOUGH = 8
"""Points of agreement that need no more: numbers of both signs, large and small ones."""
# Twice FUEL of guarded_arithmetic: up to 60 integers and 16 corners on two sides, at one unit or a few for an
# operation.
MORE_FUEL = 8000
"""Additional fuel for a comparison at integers and corners; exact numbers mostly, which are cheap."""

_ABS = frozenset({"abs"})

_Key = tuple[int, object, int]
"""A node's id, a point's key, and digits."""


@dataclass
class PointSampler:
    """Equality of expressions by sampling, with one supply of fuel; values are kept, so that lists compare fast."""

    log_base: int = 0
    tolerance: float = 0.0
    fuel: Fuel = field(default_factory=Fuel)
    _values: dict[_Key, Value] = field(default_factory=dict)
    _lost: set[_Key] = field(default_factory=set)
    """Keys of values that do not show all parts of their expression."""
    _left_reals: set[_Key] = field(default_factory=set)
    """Keys of values with a part that is not real."""
    _roughly: dict[int, complex | None] = field(default_factory=dict)
    _alive: list[Node] = field(default_factory=list)
    _has_more_fuel: bool = False
    _search: Fuel = field(default_factory=Fuel)
    """Fuel for finding corners, which is not taken from that of the comparison."""
    _has_symbols: dict[int, bool] = field(default_factory=dict)

    def value(self, node: Node, digits: int = DIGITS[0]) -> Value:
        """The value of an expression without free symbols; raises UnknownValueError."""
        return self._at(node, None, {}, digits)

    def differ(self, gold: Node, answer: Node) -> bool:
        """Return True if two constants are clearly not the same; cheap for the same nodes again and again."""
        one = self._rough(gold)
        other = self._rough(answer)
        # A first look in double precision: 1e-6 is far above its rounding, so that "differ" is safe, and nearer values
        # take the exact path.
        return one is not None and other is not None and abs(one - other) > 1e-6 * abs(one)

    def _rough(self, node: Node) -> complex | None:
        if id(node) not in self._roughly:
            self._alive.append(node)
            try:
                self._roughly[id(node)] = complex(self.value(node))
            except (UnknownValueError, OverflowError):
                self._roughly[id(node)] = None
        return self._roughly[id(node)]

    def at(self, node: Node, point: Point) -> Value:
        """The value at one point; raises UnknownValueError."""
        return NumericEvaluator(point, self.fuel, DIGITS[0], self.log_base)(node)

    def _points(self, gold: Node, answer: Node) -> Iterator[tuple[object, Point]]:
        """Return the points at which to compare two expressions; corners and integers come last, with fuel of their
        own."""
        if needs_all_points(gold, answer) and not self._has_more_fuel:
            self._has_more_fuel = True
            self.fuel.left += MORE_FUEL
        return points(gold, answer, self._searched)

    def _searched(self, node: Node, point: Point) -> Value:
        try:
            return NumericEvaluator(point, self._search, DIGITS[0], self.log_base)(node)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise UnknownValueError(str(error)) from None

    def equal(self, gold: Node, answer: Node, positive: bool = False) -> bool | None:
        """Return True if two expressions have the same value wherever both have one, False if not; None if that cannot
        be told.

        With `positive` only positive values of the symbols count.
        """
        if not (symbols(gold) or symbols(answer)):
            return self._constants(gold, answer)
        if matrices.order_counts(gold, answer):
            try:
                return matrices.equal(gold, answer, self.fuel)
            except UnknownValueError:  # the gold is no formula of vectors or matrices: its letters are numbers
                # Nabla has no value as a number, so that there is nothing to fall back to.
                if matrices.has_nabla(gold):
                    return None
        return self._agree_at_points(gold, answer, positive)

    def _agree_at_points(self, gold: Node, answer: Node, positive: bool) -> bool | None:
        """`equal` for expressions with variables that stand for numbers."""
        has_i = any(isinstance(node, Symbol) and node.name == "i" for side in (gold, answer) for node in walk(side))
        strict = has_any(_ABS, gold) != has_any(_ABS, answer)
        agreed = agreed_off_axis = agreed_real = agreed_positive = 0
        has_branches = has_domain = False
        """True if the two differ at a point where a part of one is not real, and at one where one of them is not."""
        hidden: list[tuple[object, Point]] = []
        thorough = needs_all_points(gold, answer)
        for number, point in self._points(gold, answer):
            is_complex = has_i or not is_real_point(point)
            if positive and not is_positive_point(point):
                continue
            try:
                one = self._at(gold, number, point)
                other = self._at(answer, number, point)
            except TooLargeError:
                if self.fuel.left < 0:
                    return None
                continue
            except UnknownValueError:
                continue
            real = [_is_real(value) for value in (one, other)]
            # `\sqrt{x}` at a negative point: a value that is not real where the problem is about reals.
            if not is_complex and not all(real):
                if any(real) and (strict or has_domain_at(point, gold, answer)):
                    # A branch of a logarithm differs by a multiple of i pi: real parts agree, and it is the same
                    # function where both are real.
                    if strict or not self._differ_by_branch(one, other):
                        return False
                    has_domain = True
                agreed_off_axis += not any(real) and self._agree(gold, answer, number, point) is not False
                continue
            same = self._agree(gold, answer, number, point)
            are_real = not (is_complex or self._leaves_reals(number, gold, answer))
            if same is False:
                if are_real or is_complex or strict:
                    return False
                has_branches = True
            if same is None:
                hidden.append((number, point))
            agreed += same is True and _is_telling(one)
            agreed_real += same is True and are_real and _is_telling(one)
            agreed_positive += same is True and are_real and is_positive_point(point)
            # Corners and integers come last among the points, so that functions that have any need them all.
            if agreed == ENOUGH and not thorough and not (has_branches or has_domain):
                return True
        if (has_branches or has_domain) and (agreed_real < 3 or (has_domain and not agreed_positive)):
            return False
        # High precisions are slow (1,300 digits), so that they are used only where fewer than three points have agreed.
        for number, point in hidden:
            if agreed >= 3:
                break
            same = self._agree(gold, answer, number, point, DIGITS)
            if same is False:
                return False
            agreed += same is True and _is_telling(self._at(gold, number, point))
        # Fewer than ENOUGH points have a value where a root or a factorial restricts the domain. The second case: no
        # value of either side is real at any point.
        if agreed >= 3 or (agreed == 0 and agreed_off_axis >= 3):
            return True
        return None

    def _constants(self, gold: Node, answer: Node) -> bool | None:
        try:
            one = self.value(gold)
        except UnknownValueError:
            return None
        try:
            other = self.value(answer)
        except TooLargeError:
            # The gold has a value within the bounds and the answer has none: it is another number. With no fuel left
            # nothing is known.
            return False if self.fuel.left > 0 else None
        except UnknownValueError:
            return None
        if self.tolerance and abs(
            one - other if type(one) is type(other) else complex(one) - complex(other)
        ) <= self.tolerance * abs(one):
            return True
        if self._is_rounded(gold, answer) or self._is_rounded(answer, gold):
            return True
        same = self._agree(gold, answer, None, {}, DIGITS)
        if same and not _is_telling(one):
            return None
        return same

    def _is_rounded(self, exact: Node, rounded: Node) -> bool:
        """Return True if `rounded` is a decimal that is right for the real number `exact`, see numeric.is_rounding."""
        decimal = as_decimal(rounded)
        other = as_decimal(exact)
        if decimal is None or decimal.places is None or is_integer_literal(exact):
            return False
        places = decimal.places
        if other is not None and other.places is not None and other.places <= places:
            return False
        # At least 20 digits more than the decimal has: the comparison is about its last digit.
        digits = next((digits for digits in DIGITS if digits > places + 2 * MARGIN), DIGITS[-1])
        try:
            value = self.value(exact, digits)
        except UnknownValueError:
            return False
        return _is_real(value) and is_rounding(value.real, decimal.value, places)

    def proportional(self, gold: Node, answer: Node, factors: Sequence[str] = ()) -> bool | None:
        """Return True if one expression is a constant, not zero, times the other; None if too few points tell.

        Powers of the symbols in `factors` count as constants. Formulas of vectors or matrices must be equal.
        """
        if matrices.order_counts(gold, answer):
            return self.equal(gold, answer) or self.equal(gold, Apply("neg", (answer,)))
        # 5^3 = 125 combinations of powers from -2 to 2; with more letters the search would take all the fuel.
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
        evaluator = NumericEvaluator({}, self.fuel, digits)
        if not all(isinstance(value, Fraction) for pair in pairs for value in pair):
            pairs = [(evaluator.inexact(one), evaluator.inexact(other)) for one, other in pairs]
        # Cross products a_i b_s = b_i a_s against the largest pair: no division, and no small divisor.
        scale = max(pairs, key=lambda pair: abs(pair[0]))
        crossed = [(a * scale[1], b * scale[0]) for a, b in pairs]
        if isinstance(scale[0], Fraction):
            return all(a == b for a, b in crossed)
        # `tiny` is 10^(MARGIN - digits); a product of two values, each of which has lost MARGIN digits, loses twice as
        # many.
        noise = evaluator.tiny * 10**MARGIN  # of a product of two inexact values
        return all(abs(a - b) <= noise * (abs(a) + abs(b)) for a, b in crossed)

    def _pairs(
        self, gold: Node, answer: Node, powers: dict[str, int], digits: int
    ) -> tuple[list[tuple[Value, Value]], int]:
        """The values at the points that show all parts of both, and how many points do not."""
        pairs: list[tuple[Value, Value]] = []
        hidden = 0
        for number, point in self._points(gold, answer):
            evaluator = NumericEvaluator({}, self.fuel, digits)
            try:
                one = self._at(gold, number, point, digits)
                other = self._at(answer, number, point, digits)
            except UnknownValueError:
                continue
            terms = [Apply("^", (Symbol(name), Number(Fraction(power)))) for name, power in powers.items()]
            factor = self._at(Apply("*", (*terms, Number(Fraction(1)))), number, point, digits)
            if not (isinstance(one, Fraction) and isinstance(other, Fraction)):
                one = evaluator.inexact(one)
                other = evaluator.inexact(other)
                factor = evaluator.inexact(factor)
            if evaluator.lost or self._is_lost(gold, number, digits) or self._is_lost(answer, number, digits):
                hidden += 1
            else:
                pairs.append((one, other * factor))
        return pairs, hidden

    def same_sign(self, gold: Node, answer: Node) -> bool | None:
        """Return True if two proportional expressions have the same sign; None if no point tells."""
        for number, point in self._points(gold, answer):
            try:
                one = self._at(gold, number, point)
                other = self._at(answer, number, point)
            except UnknownValueError:
                continue
            if _is_real(one) and _is_real(other) and one != 0 and other != 0:
                inexact = NumericEvaluator({}, self.fuel).inexact
                return bool((inexact(one).real > 0) == (inexact(other).real > 0))
        return None

    def _at(self, node: Node, number: object, point: Point, digits: int = DIGITS[0]) -> Value:
        key = self._key(node, number, digits)
        if key not in self._values:
            try:
                evaluate = NumericEvaluator(point, self.fuel, digits, self.log_base)
                self._values[key] = evaluate(node)
                if evaluate.lost:
                    self._lost.add(key)
                if evaluate.left_reals:
                    self._left_reals.add(key)
            except UnknownValueError as unknown:
                self._values[key] = unknown
            except (ArithmeticError, ValueError, TypeError) as error:  # mpmath raises these outside a domain
                self._values[key] = UnknownValueError(str(error))
        value = self._values[key]
        if isinstance(value, UnknownValueError):
            raise value
        return value

    def _key(self, node: Node, number: object, digits: int) -> _Key:
        if id(node) not in self._has_symbols:
            self._alive.append(node)  # its id is a key
            self._has_symbols[id(node)] = bool(symbols(node))
        return id(node), number if self._has_symbols[id(node)] else None, digits

    def _agree(
        self, gold: Node, answer: Node, number: object, point: Point, precisions: Sequence[int] = DIGITS[:2]
    ) -> bool | None:
        """Exact for fractions; else equal but for an error that shrinks with the precision. None where no precision
        shows all parts of both."""
        last = None
        coarser = 0
        for digits in precisions:
            evaluator = NumericEvaluator({}, self.fuel, digits)
            one = self._at(gold, number, point, digits)
            other = self._at(answer, number, point, digits)
            if isinstance(one, Fraction) and isinstance(other, Fraction):
                return bool(one == other)
            one = evaluator.inexact(one)
            other = evaluator.inexact(other)
            difference = abs(one - other)
            size = max(abs(one), abs(other))
            shown = not (evaluator.lost or self._is_lost(gold, number, digits) or self._is_lost(answer, number, digits))
            if last is None:
                # At 50 digits a difference of 1e-10 is real, and no higher precision can make it vanish.
                if difference > size * 1e-10 and difference > 1e-12:
                    return False
                if difference == 0 and shown:
                    return True
            # A rounding error shrinks by 10^(coarser - digits) from one precision to the next. Half of the exponent
            # allows for badly conditioned expressions.
            elif difference > size * evaluator.tiny and difference > last * evaluator.mp.mpf(10) ** (
                (coarser - digits) // 2
            ):
                return False  # it has not shrunk with the precision
            elif shown:
                return True
            last = difference
            coarser = digits
        return None

    def _leaves_reals(self, number: object, *nodes: Node) -> bool:
        """Return True if a part of an expression is not real at a point."""
        return any(self._key(node, number, DIGITS[0]) in self._left_reals for node in nodes)

    def _differ_by_branch(self, one: Value, other: Value) -> bool:
        r"""Return True if a real value and one that is not differ by a branch of a logarithm (`\ln x + \ln y` for
        `\ln xy`)."""
        difference = NumericEvaluator({}, self.fuel).add(one, -other)
        # 20 of 50 digits: far above rounding, far below any difference of formulas.
        return bool(abs(difference.real) <= 1e-20 * (abs(one) + abs(other)))

    def _is_lost(self, node: Node, number: object, digits: int) -> bool:
        """Return True if the value there does not show all parts of its expression."""
        return self._key(node, number, digits) in self._lost


def _is_telling(value: Value) -> bool:
    """Return True if two such values that agree are equal: of a huge rounded value the last digits are lost."""
    # At 50 digits a value of 1e30 still shows 20 decimals.
    return isinstance(value, Fraction) or abs(value) < 1e30


def _is_real(value: Value) -> bool:
    # Rounding leaves imaginary parts of about 1e-50 of the value; 1e-20 separates them from real ones.
    return isinstance(value, Fraction) or abs(value.imag) <= abs(value) * 1e-20
