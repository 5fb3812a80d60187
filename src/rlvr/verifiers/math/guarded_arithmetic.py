"""Arithmetic with bounds: exact fractions where possible, else mpmath numbers of fixed precision, real or complex.

Every operation is guarded before it is computed: exponents, factorials and arguments have bounds, and each costs fuel,
so that no expression can cost more than its fuel.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import factorial, gcd, isqrt, lcm, prod
from typing import Any, NamedTuple

MAX_BITS = 2048
"""Bits of an exact number at a sample point, where a larger one becomes a float; a constant has eight times as many, or
none."""
MAX_CONSTANT_BITS = 8 * MAX_BITS
MAX_LOG = 10**6
"""Natural logarithm of the largest float, and the largest argument of an exponential or trigonometric function."""
MAX_FACTORIAL = 10**5
FUEL = 4000
"""Cost of all evaluations in one comparison: 1 for arithmetic, 5 for a function, more at the high precisions."""
DIGITS = (50, 100, 400, 1300)
"""Precisions: a difference that shrinks with the precision is a rounding error, one that stays is real. The last tells
apart fractions of MAX_BITS bits; it is used only where the others do not show all parts of an expression."""
MARGIN = 10
"""Digits that rounding may cost: a value smaller than the rest of them is lost."""
# log2(10), rounded down: a bound on bits that is never above what the digits hold.
BITS_OF_A_DIGIT = 3.3219

Value = Any
"""Fraction, mpf or mpc."""


class Complex(NamedTuple):
    """A complex sample point."""

    real: Fraction
    imag: Fraction


Coordinate = Fraction | Complex


class UnknownValueError(Exception):
    """The expression has no value at this point: undefined, too large, or no number at all."""


class TooLargeError(UnknownValueError):
    """The value, or the work for it, is over the bounds."""


# An mpmath context holds its precision as mutable state, and verifiers run on several threads of a worker.
_LOCAL = threading.local()


def context(digits: int) -> Any:
    """An mpmath context of this precision, one for each thread."""
    contexts = _LOCAL.__dict__.setdefault("contexts", {})
    if digits not in contexts:
        # Imported on first use: plain numbers, most answers, need no mpmath.
        import mpmath

        contexts[digits] = mpmath.MPContext()
        contexts[digits].dps = digits
    return contexts[digits]


@dataclass
class Fuel:
    """The remaining budget of an evaluation; running out raises TooLargeError."""

    left: int = FUEL

    def spend(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise TooLargeError("too much to compute")


class GuardedArithmetic:
    """Operations on the values of one evaluation, each of which checks its arguments and spends fuel before it
    computes."""

    def __init__(self, point: Mapping[str, Coordinate], fuel: Fuel, digits: int = DIGITS[0], log_base: int = 0) -> None:
        self.point = point
        self.fuel = fuel
        self.mp = context(digits)
        self.log_base = log_base
        self.tiny = self.mp.ldexp(1, int((MARGIN - digits) * BITS_OF_A_DIGIT))
        # Different fractions p/q, r/s differ by 1/(ps) of their value or more: with half of the bits in each they stay
        # apart.
        self.bits = int(digits * BITS_OF_A_DIGIT) // 2
        self.cost = 1 + digits // 200  # as the time of one operation grows with its digits
        self.lost = False
        """True if a part of the expression was too small beside the rest to change the value: agreement then says
        nothing."""
        self.left_reals = False
        """True if a part of the expression has no real value."""

    def operate(self, head: str, args: list[Value]) -> Value:
        """The value of an operation on values."""
        operation = _OPERATIONS.get((head, len(args))) or _OPERATIONS.get((head, -1))
        if operation is None:
            raise UnknownValueError(f"{head} of {len(args)} is no number")
        return self._bounded(operation(self, *args))

    def _bounded(self, value: Value) -> Value:
        if isinstance(value, int):
            value = Fraction(value)
        if isinstance(value, Fraction):
            bits = value.numerator.bit_length() + value.denominator.bit_length()
            # One unit for each 512 bits: the time of a product of large fractions grows with them.
            self.fuel.spend(bits >> 9)
            if bits > (MAX_BITS if self.point else MAX_CONSTANT_BITS):
                if not self.point:
                    raise TooLargeError("an exact number of too many digits")
                return self.inexact(value)
            return value
        if not self.mp.isfinite(value):
            raise UnknownValueError("not finite")
        if self._is_complex(value):
            if value.imag == 0:
                return value.real
            self.left_reals = True
        return value

    # arithmetic

    def inexact(self, value: Value) -> Value:
        """The value as mpf or mpc; a fraction of too many digits for the precision is lost."""
        if isinstance(value, Fraction):
            # A fraction of more bits than this is rounded so far that two different ones could agree.
            self.lost = self.lost or max(value.numerator.bit_length(), value.denominator.bit_length()) > self.bits
            return self.mp.mpf(value.numerator) / value.denominator
        return value

    def add(self, *terms: Value) -> Value:
        if all(isinstance(term, Fraction) for term in terms):
            return sum(terms, Fraction(0))
        inexact = [self.inexact(term) for term in terms]
        total = functools.reduce(operator.add, inexact)
        sizes = [abs(term) for term in inexact]
        largest = max(sizes)
        # `10^{30} + 1 - 10^{30}` in floats: the difference has no correct digit left at the lowest precision.
        if largest > 1e20 and abs(total) < largest * 1e-20:
            raise TooLargeError("what is left after huge terms cancel is rounding")
        self.lost = self.lost or any(0 < size < largest * self.tiny for size in sizes)
        return total

    def multiply(self, *factors: Value) -> Value:
        product = factors[0]
        self.fuel.spend(len(factors) // 2)
        for factor in factors[1:]:
            # Two fractions stay exact; a fraction and a float become floats.
            if type(product) is type(factor):
                product = product * factor
            else:
                product = self.inexact(product) * self.inexact(factor)
            product = self._bounded(product)
        return product

    def divide(self, top: Value, bottom: Value) -> Value:
        if bottom == 0:
            raise UnknownValueError("division by zero")
        if type(top) is type(bottom):
            return top / bottom
        return self.inexact(top) / self.inexact(bottom)

    def power(self, base: Value, exponent: Value) -> Value:
        self.fuel.spend(4)
        if base == 0:
            if self.real(exponent) <= 0:
                raise UnknownValueError("a power of zero")
            return Fraction(0)
        if base == 1:
            return Fraction(1)
        if isinstance(exponent, Fraction):
            return self._rational_power(base, exponent)
        return self._exp(self.inexact(exponent) * self.mp.log(self.inexact(base)))

    def _rational_power(self, base: Value, exponent: Fraction) -> Value:
        if exponent.denominator == 1:
            if isinstance(base, Fraction):
                bits = base.numerator.bit_length() + base.denominator.bit_length()
                if bits * abs(exponent) <= (MAX_BITS if self.point else MAX_CONSTANT_BITS):
                    return base ** int(exponent)
                if not self.point:
                    raise TooLargeError("an exact power of too many digits")
            # `(-1)^n` for any size of n, without working the power out.
            if base == -1:
                return Fraction(-1 if exponent % 2 else 1)
        # A real odd root: `(-8)^{1/3}` is -2, as textbooks have it, not the principal complex root.
        elif not self._is_complex(base) and base < 0 and exponent.denominator % 2:
            root = self.power(-base, exponent)
            return -root if exponent.numerator % 2 else root
        # `4^{3/2}` is exactly 8, so that answers are compared as fractions, not as floats.
        elif isinstance(base, Fraction) and (exact := exact_root(base, exponent.denominator)) is not None:
            return self._rational_power(exact, Fraction(exponent.numerator))
        log = self.mp.log(self.inexact(base))
        size = abs(log) * abs(self.inexact(exponent))
        if size > MAX_LOG:
            raise TooLargeError("a power too large")
        self.lost = self.lost or 0 < size < self.tiny
        return self.mp.power(self.inexact(base), self.inexact(exponent))

    def root(self, radicand: Value, degree: Value = Fraction(2)) -> Value:
        return self.power(radicand, self.divide(Fraction(1), degree))

    def _exp(self, value: Value) -> Value:
        self.fuel.spend(4)
        self._moderate(value)
        exponent = self.inexact(value)
        self.lost = self.lost or 0 < abs(exponent) < self.tiny
        return self.mp.exp(exponent)

    def _moderate(self, value: Value) -> None:
        if abs(value) > MAX_LOG:
            raise TooLargeError("an argument too large")

    def log(self, value: Value, base: Value | None = None) -> Value:
        self.fuel.spend(4)
        # log_b(x) = ln(x) / ln(b) has no value there.
        if value == 0 or base in (0, 1):
            raise UnknownValueError("a logarithm of zero, or to the base one")
        return self.mp.log(self.inexact(value)) / (1 if base is None else self.mp.log(self.inexact(base)))

    def common_log(self, value: Value) -> Value:
        return self.log(value, Fraction(self.log_base) if self.log_base else None)

    def call(self, name: str, value: Value) -> Value:
        """A function of mpmath's, of a moderate argument."""
        self.fuel.spend(4)
        self._moderate(value)
        argument = self.inexact(value)
        try:
            value_there = getattr(self.mp, name)(argument)
            self.lost = self.lost or (value != 0 and self._is_flat(name, abs(argument), value_there))
            return value_there
        # A pole (`cot 0`), a value outside of the domain, or a series of mpmath that does not converge.
        except (ZeroDivisionError, ValueError, OverflowError, self.mp.NoConvergence) as error:
            raise UnknownValueError(str(error)) from None

    def _is_flat(self, name: str, size: Value, result: Value) -> bool:
        """Return True if a function hardly depends on its argument there: at its tails, or at the top of a cosine."""
        if name in ("cos", "sec", "cosh", "sech", "acos", "asec") and size * size < self.tiny:
            return True
        if name in ("tanh", "coth") and abs(abs(result) - 1) < self.tiny:
            return True
        return name in ("atan", "acot", "asec", "acsc", "atanh", "acoth") and size > 1 / self.tiny

    def factorial(self, value: Value) -> Value:
        self.fuel.spend(8)
        if self._is_complex(value) or abs(value) > MAX_FACTORIAL:
            raise TooLargeError("a factorial too large")
        # Up to 200 the factorial is exact (1,246 bits); above it is a float by the gamma function.
        if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 200:
            return Fraction(factorial(int(value)))
        if value < 0 and value == int(value):
            raise UnknownValueError("the factorial of a negative integer")
        return self.mp.gamma(self.inexact(value) + 1)

    def factorial2(self, value: Value) -> Value:
        if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 300:
            raise UnknownValueError("a double factorial of no small integer")
        return prod(range(int(value), 0, -2))

    def binomial(self, n: Value, k: Value) -> Value:
        # The product n(n-1)...(n-k+1)/k! holds for any n, fractions and complex numbers too, and costs k steps.
        if isinstance(k, Fraction) and k.denominator == 1 and 0 <= k <= 60:
            product: Value = Fraction(1)
            for j in range(int(k)):
                self.fuel.spend(1)
                product = self.multiply(product, self.divide(self.add(n, Fraction(-j)), Fraction(j + 1)))
            return product
        are_whole = isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1
        if are_whole and 0 <= n - k <= 60 and k >= 0:
            return self.binomial(n, n - k)
        below = self.multiply(self.factorial(k), self.factorial(self.add(n, -k)))
        return self.divide(self.factorial(n), below)

    def real(self, value: Value) -> Value:
        if self._is_complex(value):
            raise UnknownValueError("a complex number where a real one is needed")
        return value

    def _is_complex(self, value: Value) -> bool:
        return isinstance(value, self.mp.mpc)

    def floor(self, value: Value) -> Value:
        value = self.real(value)
        if isinstance(value, Fraction):
            return Fraction(value.numerator // value.denominator)
        return self.mp.floor(value)

    def modulo(self, value: Value, modulus: Value) -> Value:
        if not isinstance(value, Fraction) or not isinstance(modulus, Fraction) or modulus == 0:
            raise UnknownValueError("a remainder of no fractions")
        return value % modulus


def exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The exact positive root of a positive fraction, or None."""
    # `root**degree` below would be as large as the number; no answer has a 64th root.
    if value < 0 or degree > 64:
        return None
    roots = []
    for part in (value.numerator, value.denominator):
        if degree == 2:
            root = isqrt(part)
        # A float holds no number of more than 1,024 bits; above that the root is given up, and mpmath takes over.
        elif part.bit_length() < 900:
            root = round(part ** (1 / degree))
        else:
            root = 0
        if root**degree != part:
            return None
        roots.append(root)
    return Fraction(roots[0], roots[1])


def _extremum(choose: Callable[..., Value]) -> Callable[..., Value]:
    return lambda e, *args: choose(e.real(arg) for arg in args)


def _integers(fold: Callable[[int, int], int]) -> Callable[..., Value]:
    def operation(e: GuardedArithmetic, *args: Value) -> Value:
        if not all(isinstance(arg, Fraction) and arg.denominator == 1 for arg in args):
            raise UnknownValueError("no integers")
        return functools.reduce(fold, map(int, args))

    return operation


def _named(name: str) -> Callable[..., Value]:
    return lambda e, value: e.call(name, value)


_OF_MPMATH = (
    "sin cos tan cot sec csc sinh cosh tanh coth sech csch gamma arg asin acos atan acot asec acsc asinh "
    "acosh atanh acoth"
)
_OPERATIONS: dict[tuple[str, int], Callable[..., Value]] = {
    ("+", -1): GuardedArithmetic.add,
    ("*", -1): GuardedArithmetic.multiply,
    ("neg", 1): lambda e, value: -value,
    ("/", 2): GuardedArithmetic.divide,
    (":", 2): GuardedArithmetic.divide,
    ("^", 2): GuardedArithmetic.power,
    ("root", 1): GuardedArithmetic.root,
    ("root", 2): GuardedArithmetic.root,
    ("cbrt", 1): lambda e, value: e.root(value, Fraction(3)),
    ("mixed", 2): GuardedArithmetic.add,
    ("percent", 1): lambda e, value: e.divide(value, Fraction(100)),
    ("degree", 1): lambda e, value: e.multiply(value, e.mp.pi / 180),
    ("abs", 1): lambda e, value: abs(value),
    ("floor", 1): GuardedArithmetic.floor,
    ("ceil", 1): lambda e, value: -e.floor(-value),
    ("factorial", 1): GuardedArithmetic.factorial,
    ("factorial2", 1): GuardedArithmetic.factorial2,
    ("binom", 2): GuardedArithmetic.binomial,
    ("mod", 2): GuardedArithmetic.modulo,
    ("exp", 1): GuardedArithmetic._exp,
    ("ln", 1): GuardedArithmetic.log,
    ("log", 1): GuardedArithmetic.common_log,
    ("log", 2): GuardedArithmetic.log,
    ("lg", 1): lambda e, value: e.log(value, Fraction(10)),
    ("max", -1): _extremum(max),
    ("min", -1): _extremum(min),
    ("gcd", -1): _integers(gcd),
    ("lcm", -1): _integers(lcm),
    ("sgn", 1): lambda e, value: Fraction((e.real(value) > 0) - (value < 0)),
    ("re", 1): lambda e, value: e.inexact(value).real,
    ("im", 1): lambda e, value: e.inexact(value).imag,
    **{(name, 1): _named(name) for name in _OF_MPMATH.split()},
}
