"""Points at which two expressions are compared: points of the kinds that tell their operations apart.

Every expression is compared at reals of both signs, positive reals, small integers and near 1. Operations that are one
formula here and another one there ask for more: complex numbers for Re, Im, arg, conjugates and the modulus of z or w;
integers up to 60 and multiples of the constants for integer functions; both sides of each corner, and the corner, for
absolute values, maxima, signs, roundings, even roots and inverse functions. All points are fixed: verdicts are
deterministic.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import isqrt, lcm
from typing import Any

from rlvr.verifiers.math.expression import rational, symbols, walk
from rlvr.verifiers.math.guarded_arithmetic import (
    MAX_BITS,
    Complex,
    Coordinate,
    TooLargeError,
    UnknownValueError,
    exact_root,
)
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Node, Number, Symbol

Point = dict[str, Coordinate]
Valued = Callable[[Node, Point], Any]
"""The value of a node at a point; raises UnknownValueError."""

WHOLE = 4
"""Points of small positive integers, where factorials and binomials are exact."""
LARGEST = 60
"""Integers at which integer functions of one variable are compared."""
PAIRS = 24
"""Points of such integers for functions of several variables."""
PIECEWISE = frozenset({"abs", "max", "min", "floor", "ceil", "sgn", "mod"})
"""Operations that are one formula here and another one there."""
_INVERSES = {"asin": "sin", "acos": "cos", "atan": "tan", "acot": "cot"}
"""Inverse functions, which leave their branch where an argument has a pole, or where the periodic function inside
turns."""
INTEGER_FUNCTIONS = frozenset({"gcd", "lcm", "mod", "floor", "ceil", "factorial", "factorial2", "binom"})
# Larger constants are sizes of answers (`10^{12}`), not moduli, and their multiples cost large fractions.
MAX_CONSTANT = 10**9
"""Size of a constant whose multiples are tried."""
MAX_CORNERS = 16
"""Corners of one variable on whose sides expressions are compared."""

_CURVING = {"^": 1, "*": 2}
"""Arguments with a variable that make an operation curved."""
_QUARTERS = tuple(map(Number, (Fraction(-1), Fraction(-1, 2), Fraction(0), Fraction(1, 2), Fraction(1))))
"""Multiples of pi at which a periodic function turns or has a pole."""
# Values have 50 digits, MARGIN (10) of which rounding may take; five more are left for the differences that roots are
# computed from.
NOISE = Fraction(1, 10**35)
"""Relative rounding error of the values that corners are found from."""
_COMPLEX_PARTS = frozenset({"re", "im", "arg"})
_CONJUGATES = ("bar ", "overline ")
# Where a corner is looked for if its argument is no polynomial of degree 2: a change of sign from one to the next.
_GRID = tuple(sign * Fraction(m) * Fraction(10) ** k for sign in (-1, 1) for k in range(-2, 12) for m in (1, 3))


def has_any(heads: frozenset[str], *nodes: Node) -> bool:
    """Return True if one of these operations is applied to a free variable."""
    free = frozenset().union(*map(symbols, nodes))
    return any(
        isinstance(below, Apply) and below.head in heads and symbols(below) & free
        for node in nodes
        for below in walk(node)
    )


def has_domain_at(point: Point, *nodes: Node) -> bool:
    """Return True if it counts at this point that one expression is real and another one is not: variables are often
    understood to be positive, and an exponent of what may be negative (`(-1)^n`) to be an integer."""
    if not is_positive_point(point):
        return False
    return all(isinstance(value, Fraction) and value.denominator == 1 for value in point.values()) or not any(
        # Only a variable or a number without a sign is a positive base.
        isinstance(below, Apply)
        and below.head == "^"
        and symbols(below.args[1])
        and not isinstance(base := below.args[0], Symbol)
        and not (isinstance(base, Number) and base.value > 0)
        for node in nodes
        for below in walk(node)
    )


def needs_all_points(*nodes: Node) -> bool:
    """Return True if the expressions may differ at a few points only, so that agreement elsewhere is not enough."""
    return has_any(INTEGER_FUNCTIONS, *nodes) or _is_piecewise(*nodes)


def _is_piecewise(*nodes: Node) -> bool:
    """Return True if the expressions may be one formula here and another one there."""
    return has_any(PIECEWISE, *nodes) or any(
        symbols(argument) for node in nodes for below in walk(node) for argument in _branches(below)
    )


def is_real_point(point: Point) -> bool:
    """Return True if all coordinates are real."""
    return not any(isinstance(value, Complex) for value in point.values())


def is_positive_point(point: Point) -> bool:
    """Return True if all coordinates are positive reals."""
    return all(isinstance(value, Fraction) and value > 0 for value in point.values())


def complex_variables(*nodes: Node) -> frozenset[str]:
    """The variables that stand for complex numbers: those in a real or imaginary part or an argument, and z and w in a
    modulus or with a bar."""
    names: set[str] = set()
    for node in nodes:
        for below in walk(node):
            match below:
                case Apply(head) if head in _COMPLEX_PARTS:
                    names |= {_base(name) for name in symbols(below)}
                case Apply("abs"):
                    names |= {_base(name) for name in symbols(below) if _base(name)[0] in "zw"}
                case Symbol(name) if name.startswith(_CONJUGATES) and _base(name)[0] in "zw":
                    names.add(_base(name))
    return frozenset(names)


def points(gold: Node, answer: Node, value: Valued) -> Iterator[tuple[object, Point]]:
    """The points for two expressions, each with a key: equal keys are equal values of a name."""
    names = symbols(gold) | symbols(answer)
    numbers = complex_variables(gold, answer)
    complex_names = sorted(name for name in names if _base(name) in numbers)
    real_names = sorted(names - set(complex_names))
    kind = "complex" if complex_names else "real"
    for number in range(len(_complex_coordinates("z")) if complex_names else 0):
        yield (kind, number), _mixed(complex_names, real_names, number)
    far = _is_piecewise(gold, answer)
    # A conjugate has its variable's value on the real axis.
    values = [coordinates(_base(name) if name in complex_names else name) for name in sorted(names)]
    basic = [dict(zip(sorted(names), point, strict=True)) for point in zip(*values, strict=True)]
    for number, point in enumerate(basic if far else basic[:-2]):
        yield (kind, "axis", number), point
    if has_any(INTEGER_FUNCTIONS, gold, answer) and not complex_names:
        yield from _integers(real_names, _constants(gold, answer))
    if far:
        yield from _corners(gold, answer, real_names, basic, value)


def _base(name: str) -> str:
    """The variable of a conjugate, or the name itself."""
    for prefix in _CONJUGATES:
        name = name.removeprefix(prefix)
    return name


@functools.lru_cache(maxsize=512)
def coordinates(name: str) -> tuple[Fraction, ...]:
    """The real values of a name, the same in every comparison; the last two are far from 0."""
    rng = random.Random(zlib.crc32(name.encode()))

    # The generator is seeded by the name: the same values in every process, and other values for other letters.
    def fraction(low: int, high: int) -> Fraction:
        return Fraction(2 * rng.randint(low, high) + 1, rng.choice([8, 10, 14, 22]))  # odd / even: no real root of -1

    mixed = [rng.choice([-1, 1]) * fraction(0, 24) for _ in range(4)]
    large = [fraction(11, 24) for _ in range(2)]
    small = [fraction(0, 3) for _ in range(2)]
    whole = [Fraction(rng.randint(1, 6)) for _ in range(WHOLE)]
    # x^50 and x^51, or e to these, are told apart neither near 0 nor far from 1.
    near_one = [1 + Fraction(rng.choice([-1, 1]), 2 * rng.randint(10, 30)) for _ in range(3)]
    # Far from 0 an absolute value, a maximum or a rounding shows its other formula.
    far = [sign * Fraction(2 * rng.randint(10**3, 10**4) + 1, 2) for sign in (-1, 1)]
    return (*mixed, *large, *small, *whole, *near_one, *far)


# complex points


@functools.lru_cache(maxsize=64)
def _complex_coordinates(name: str) -> tuple[Complex, ...]:
    """One number in each quadrant, and two more."""
    rng = random.Random(zlib.crc32(name.encode()))
    signs = [(1, 1), (-1, 1), (-1, -1), (1, -1), (1, 1), (-1, -1)]
    return tuple(Complex(a * _odd(rng), b * _odd(rng)) for a, b in signs)


def _odd(rng: random.Random) -> Fraction:
    return Fraction(2 * rng.randint(1, 15) + 1, rng.choice([8, 14]))


def _mixed(complex_names: Sequence[str], real_names: Sequence[str], number: int) -> Point:
    point: Point = {name: coordinates(name)[number] for name in real_names}
    for name in complex_names:
        value = _complex_coordinates(_base(name))[number]
        if _base(name) == name:
            point[name] = value
        else:
            point[name] = Complex(value.real, -value.imag)
    return point


# integers


def _constants(*nodes: Node) -> list[int]:
    """The integers above 1 that occur, and their least common multiple."""
    integers = {
        int(abs(below.value))
        for node in nodes
        for below in walk(node)
        if isinstance(below, Number) and below.value.denominator == 1 and 1 < abs(below.value) < MAX_CONSTANT
    }
    # Functions with several moduli (`\gcd(n, 12)`, `n \bmod 18`) meet again at the multiples of all.
    common = lcm(*integers) if integers else 1
    if common < MAX_CONSTANT:
        return sorted(integers | {common} - {1})
    return sorted(integers)


def _integers(names: Sequence[str], constants: Sequence[int]) -> Iterator[tuple[object, Point]]:
    """Multiples of the constants, together and one name at a time, then integers up to 60."""
    for constant in constants:
        for factor in (1, 2, 5):
            yield ("multiple", constant, factor), {name: Fraction(constant * factor) for name in names}
        for name in names if len(names) > 1 else ():
            alone = {other: _shuffled(other)[0] for other in names}
            yield ("multiple", constant, name, tuple(names)), {**alone, name: Fraction(constant)}
    for number in range(LARGEST if len(names) == 1 else PAIRS):
        yield ("integer", number), {name: _shuffled(name)[number] for name in names}


@functools.lru_cache(maxsize=128)
def _shuffled(name: str) -> tuple[Fraction, ...]:
    order = [Fraction(n) for n in range(1, LARGEST + 1)]
    random.Random(zlib.crc32(name.encode())).shuffle(order)
    return tuple(order)


def _corners(
    gold: Node, answer: Node, names: Sequence[str], basic: Sequence[Point], value: Valued
) -> Iterator[tuple[object, Point]]:
    """For each variable, the others being fixed: the corners, a point between any two neighbours, and points
    outside."""
    arguments = list(dict.fromkeys(factor for side in (gold, answer) for factor in _arguments(side)))
    # The first basic point has mixed signs, the fifth is positive (see `coordinates`): a corner may exist at one of
    # them only.
    for place in (0, 4) if len(names) > 1 else (0,):
        for name in names:
            zeros: set[Fraction] = set()
            for argument in arguments:
                if name in symbols(argument) and len(zeros) < MAX_CORNERS:
                    zeros |= _zeros(argument, name, basic[place], value)
            corners = sorted(zeros)
            if not corners:
                continue
            between = [(low + high) / 2 for low, high in itertools.pairwise(corners)]
            # Beyond all corners on both sides, where one formula holds to infinity.
            size = max([Fraction(10**6), *map(abs, corners)])
            outside = [corners[0] - 1, corners[0] - size, corners[-1] + 1, corners[-1] + size]
            for at in (*between, *outside, *corners):
                yield ("corner", place, name, at), {**basic[place], name: at}


def _arguments(node: Node) -> Iterator[Node]:
    """Expressions whose zeros are the corners of `node`."""
    for below in walk(node):
        match below:
            case Apply("abs" | "sgn", (argument,)):
                yield from _factors(argument)
            case Apply("max" | "min", arguments):
                for place, one in enumerate(arguments):
                    for other in arguments[:place]:
                        yield from _factors(Apply("+", (one, Apply("neg", (other,)))))
            case Apply("floor" | "ceil", (argument,)):
                # The steps of a floor are at all integers; four of them show whether two functions step alike.
                yield from (_minus(argument, step) for step in range(-1, 3))
            case Apply("mod", (argument, modulus)):
                yield from (_minus(Apply("/", (argument, modulus)), step) for step in range(-1, 3))
            case _:
                yield from _branches(below)


def _branches(node: Node) -> Iterator[Node]:
    r"""Expressions whose zeros are the corners of a root (`\sqrt{(x-20)^2}`) or of an inverse function
    (`\arctan\frac{1}{x}`)."""
    match node:
        case Apply("root" | "^", (radicand, *_)) if _is_even_root(node) and _is_curved(radicand):
            yield from _factors(radicand)
        case Apply(head, (argument,)) if head in _INVERSES:
            for below in walk(argument):
                match below:
                    case Apply("/", (_, divisor)):
                        yield from _factors(divisor)
                    case Apply(inner, (angle,)) if inner == _INVERSES[head]:
                        yield from (Apply("+", (angle, Apply("*", (turn, Symbol("pi"))))) for turn in _QUARTERS)


def _is_even_root(node: Apply) -> bool:
    """Return True if a root or a power has a degree, or a denominator of the exponent, that is even."""
    if node.head == "root":
        (degree,) = node.args[1:] or (Number(Fraction(2)),)
        return isinstance(degree, Number) and degree.value.denominator == 1 and degree.value % 2 == 0
    exponent = rational(node.args[1])
    return exponent is not None and exponent.denominator % 2 == 0


def _is_curved(radicand: Node) -> bool:
    """Return True if a radicand may touch zero without a change of its sign: one with a power or a product of
    variables."""
    return any(
        isinstance(below, Apply) and sum(map(bool, map(symbols, below.args))) >= _CURVING.get(below.head, 99)
        for below in walk(radicand)
    )


def _minus(node: Node, step: int) -> Node:
    return Apply("+", (node, Number(Fraction(-step))))


def _factors(node: Node) -> Iterator[Node]:
    """Parts whose zeros are the zeros and poles of `node`."""
    match node:
        case Apply("*" | "/", args):
            for arg in args:
                yield from _factors(arg)
        case Apply("^" | "root" | "neg" | "abs" | "sgn", (arg, *_)) | Bracket(items=(arg,)):
            yield from _factors(arg)
        case _:
            yield node


def _zeros(node: Node, name: str, point: Point, value: Valued) -> set[Fraction]:
    """Return the zeros of `node` as a function of one variable: exactly for a polynomial of degree 2, nearly for
    others."""

    def at(x: Fraction) -> Any:
        try:
            result = value(node, {**point, name: x})
        except TooLargeError:
            raise
        except UnknownValueError:
            return None
        if isinstance(result, Fraction) or not result.imag:
            return result
        return None

    try:
        # Three values fix a polynomial of degree 2, the other two confirm it: f(x) = square x^2 + slope x + a.
        values = [at(Fraction(x)) for x in (0, 1, 2, 3, 7)]
        exact = [_as_fraction(number) for number in values if number is not None]
        fractions = [number for number in exact if number is not None]
        if len(fractions) == len(values):
            noise = Fraction(0)
            if any(not isinstance(number, Fraction) for number in values):
                noise = NOISE * max(map(abs, fractions))
            a, b, c, d, e = fractions
            square = (c - 2 * b + a) / 2
            slope = b - a
            square = square if abs(square) > noise else Fraction(0)
            slope -= square
            if all(abs(square * x * x + slope * x + a - number) <= noise for x, number in ((3, d), (7, e))):
                return _roots(square, slope, a)
        return _crossings(at)
    except TooLargeError:
        return set()


def _as_fraction(value: Any) -> Fraction | None:
    """A real value as a fraction, exactly; None where that has too many digits."""
    if isinstance(value, Fraction):
        return value
    # mpmath keeps (sign, mantissa, exponent, bits) with value = (-1)^sign mantissa 2^exponent.
    sign, mantissa, exponent, _ = value.real._mpf_
    if abs(exponent) > MAX_BITS:
        return None
    return (-1 if sign else 1) * Fraction(int(mantissa)) * Fraction(2) ** exponent


def _roots(square: Fraction, slope: Fraction, constant: Fraction) -> set[Fraction]:
    """The real zeros of a polynomial of degree 2 or less."""
    if square == 0:
        return set() if slope == 0 else {-constant / slope}
    inside = slope * slope - 4 * square * constant
    # The discriminant b^2 - 4ac.
    if inside < 0:
        return set()
    root = exact_root(inside, 2)
    if root is None:  # to 64 binary places
        root = Fraction(isqrt((inside.numerator * inside.denominator) << 128), inside.denominator << 64)
    return {(-slope + sign * root) / (2 * square) for sign in (-1, 1)}


def _crossings(at: Callable[[Fraction], Any]) -> set[Fraction]:
    """Places near which a function changes its sign."""
    places = set()
    grid = sorted((*_GRID, Fraction(0)))
    signs = [at(x) for x in grid]
    for (low, before), (high, after) in itertools.pairwise(zip(grid, signs, strict=True)):
        if before is None or after is None or before == 0 or (before > 0) == (after > 0):
            places |= {low} if before is not None and before == 0 else set()
            continue
        # Bisection: 30 halvings of an interval of the grid; the sides of a corner are compared midway to its
        # neighbours, so that its exact place is not needed.
        for _ in range(30):
            middle = (low + high) / 2
            here = at(middle)
            if here is None:
                break
            if (here > 0) == (before > 0):
                low, high = (middle, high)
            else:
                low, high = (low, middle)
        places.add(low)
    return places
