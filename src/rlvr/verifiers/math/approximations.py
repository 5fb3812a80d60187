r"""Approximations: two values joined by `\approx`.

The rule, decided here alone: `a \approx b` gives both values where one is the other rounded to the digits that it is
written with (`\sqrt{2} \approx 1.41`); else the answer is refused, since it states two values (`41 \approx 42`). Half a
unit of the last digit is rounded away from zero: `3.5 \approx 4`, not `3.5 \approx 3`. Zeros at the end are digits
(`\sqrt{2} \approx 1.40` is false), and a chain does not gain digits (`\frac{1}{3} \approx 0.3 \approx 0.33`).
"""

from __future__ import annotations

from fractions import Fraction

from rlvr.verifiers.math.expression import is_literal, rational
from rlvr.verifiers.math.guarded_arithmetic import UnknownValueError
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Node, Number, Quantity
from rlvr.verifiers.math.point_sampling import PointSampler


def is_rounding_pair(one: Node, other: Node, sampler: PointSampler) -> bool:
    """Return True if one of two values is the other one rounded, or both are equal."""
    return sampler.equal(one, other) is True or _rounds(one, other, sampler) or _rounds(other, one, sampler)


def is_rounded(exact: Node, rounded: Node, sampler: PointSampler) -> bool:
    """Return True if the second of two values is the first one with fewer digits, or with as many."""
    return sampler.equal(exact, rounded) is True or _rounds(exact, rounded, sampler)


def _rounds(exact: Node, rounded: Node, sampler: PointSampler) -> bool:
    """Return True if `rounded` is a decimal, not zero, that is `exact` rounded to its last digit."""
    unit = _last_place(rounded)
    if unit is None:
        return False
    try:
        value = sampler.value(exact)
        near = sampler.value(rounded)
        if isinstance(value, Fraction) and isinstance(near, Fraction):
            away = abs(near) - abs(value)  # a tie goes away from zero
            return near != 0 and abs(near - value) <= unit / 2 and away != -unit / 2
        # The margin is for values that are not exact themselves.
        # Half a unit of the last digit, with a margin of 1e-9 of it: a float of 50 digits that is a tie may fall on
        # either side.
        return near != 0 and abs(complex(value) - complex(near)) <= 0.5 * float(unit) * (1 + 1e-9)
    except (UnknownValueError, OverflowError):
        return False


def _last_place(node: Node) -> Fraction | None:
    r"""The unit of the last digit of a decimal (0.01 of 1.40, 1 of 42, 1000 of `1.0 \times 10^4`); None for anything
    else."""
    match node:
        case Number(value, 0, places):
            if places is None and value.denominator != 1:
                return None
            return Fraction(10) ** -(places or 0)
        case Apply("neg", (arg,)) | Bracket("(", ")", (arg,)) | Quantity(value=arg):
            return _last_place(arg)
        case Apply("percent" | "degree" as mark, (arg,)):
            place = _last_place(arg)
            # A degree is pi / 180.
            if mark == "percent":
                size = Fraction(1, 100)
            else:
                size = Fraction(0.017453292519943295)
            return None if place is None else place * size
        case Apply("*", (Number() as mantissa, Apply("^", (Number(), exponent)))) if is_literal(node):
            place = _last_place(mantissa)
            power = rational(exponent)
            # A double ends at 1e308, and the bound is compared as a float above.
            if place is None or power is None or abs(power) > 300:
                return None
            return place * Fraction(10) ** int(power)
    return None
