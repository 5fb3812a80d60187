"""The comparison of a program's result with the expected one; runs in the trainer's process, on text and exact builtin
values only.

Text is compared token by token: equal letter by letter, but for an expected token that is a number and no integer,
which any number within the tolerance equals. So an expected `3` is not `3.0`, and an expected `0.5` may be `0.50` or
`5e-1`. Values are compared by type, also within sets and the keys of dicts: a bool is no number, an expected integer is
an integer.

The peers: LiveCodeBench compares lines of decimals exactly (`testing_util.py`), EvalPlus takes 1e-6 + 1e-7 |expected|
(`evalplus/eval/__init__.py`), CodeContests 1e-5 in all (`execution/tester_sandboxer.cc`). The last two take 0 for a
small answer.

Invariants: the time is linear in the texts and values; nothing here raises on what a program gave.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Matches `-1`, `.5`, `2.`, `1e-7`; not `1,000`, `0x10`, `inf` or `1e99999` (ASCII: no other digits).
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?", re.ASCII)
# Matches `-12`; not `12.0`, which allows a tolerance.
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
GROWS_TO = 5e4
"""Size of the expected number beyond which the allowed difference no longer grows. With a tolerance of 1e-6 it is 0.05
there: less than the distance between two numbers of one decimal, or between a half and the integers beside it (floor
division)."""
# About 4,500 times the spacing of doubles near 1 (2.2e-16): the rounding of some thousands of additions.
_DOUBLE_LOSS = 1e-12
"""Relative error of a computation with doubles, allowed for numbers of any size. It is larger than the bound by
`GROWS_TO` from 5e10 on (with a tolerance of 1e-6)."""
# A double written out has at most 309 digits before its point; longer tokens are compared as text.
_LONGEST = 400
"""Longest token, in characters, that is compared as a number."""


@dataclass(frozen=True)
class Comparison:
    """Rules of the comparison of outputs and values; a task's `comparison` gives these by name."""

    tolerance: float = 1e-6
    """Tolerance for an expected number that is no integer, relative to it (up to `GROWS_TO`); absolute where 0.0 is
    expected. 0 or more."""
    lines: bool = False
    """Compare texts line by line, with the spaces inside lines, instead of token by token; spaces at the ends of lines
    never count."""
    ignore_case: bool = False
    """Ignore the case of printed text: YES equals yes."""
    strict_sequences: bool = False
    """Distinguish tuples from lists. Off by default, since tasks in JSON cannot say which is meant."""
    strict_numbers: bool = True
    """Distinguish True, 1 and 1.0 in values; an int still equals an expected float of that value. Off: numbers are
    equal if Python's `==` says so."""

    @classmethod
    def read(cls, written: Any, default: Comparison) -> Comparison:
        """`default` with what a task writes. ValueError says what is wrong, in words."""
        from rlvr.errors import nearest  # not above: what judges in a sandbox has the standard library only

        if written is None:
            return default
        if not isinstance(written, Mapping):
            raise ValueError(f"'comparison' is a mapping such as {{tolerance: 1e-6}}, not {type(written).__name__}")
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        for name, value in written.items():
            if name not in fields:
                raise ValueError(f"'comparison' has no {name!r}{nearest(str(name), fields)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name == "tolerance" and not (number and math.isfinite(value) and value >= 0):
                raise ValueError(f"comparison.tolerance is a number of 0 or more, not {value!r}")
            if name != "tolerance" and not isinstance(value, bool):
                raise ValueError(f"comparison.{name} is true or false, not {value!r}")
        return dataclasses.replace(default, **written)


def same_text(found: str, expected: str, how: Comparison) -> str | None:
    """None where a program printed what was expected, else the first difference in words."""
    if how.ignore_case:
        found = found.casefold()
        expected = expected.casefold()
    if how.lines:
        return _first_difference(_lines(found), _lines(expected), how, "line", by_value=False)
    return _first_difference(found.split(), expected.split(), how, "token", by_value=True)


def _lines(text: str) -> list[str]:
    # Trailing blank lines go with the first `rstrip`, trailing spaces of lines with the second.
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _first_difference(found: list[str], expected: list[str], how: Comparison, unit: str, by_value: bool) -> str | None:
    # Texts first: `_near` parses numbers, which is slow, and right answers are mostly equal.
    for number, (one, wanted) in enumerate(zip(found, expected, strict=False), start=1):
        if one != wanted and not (by_value and _near(one, wanted, how.tolerance)):
            return f"{unit} {number} is {short(one)} where {short(wanted)} is expected"
    if len(found) != len(expected):
        return f"{len(found)} {unit}s where {len(expected)} are expected"
    return None


def _near(found: str, expected: str, tolerance: float) -> bool:
    if len(found) > _LONGEST or len(expected) > _LONGEST or _INTEGER.fullmatch(expected):
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found)):
        return False
    one = _float(found)
    wanted = _float(expected)
    return one is not None and wanted is not None and _close(one, wanted, tolerance)


def _float(text: str) -> float | None:
    """The number that a token writes, or None where a float cannot hold it: 1e999 and 1e-999 are equal to themselves
    only."""
    value = float(text)
    # `1e-999` underflows to 0.0, and would equal every other number that does.
    mantissa = text.casefold().partition("e")[0]
    lost = value == 0 and any(digit in mantissa for digit in "123456789")
    return None if lost or math.isinf(value) else value


def _close(found: float, expected: float, tolerance: float) -> bool:
    """Return True if two numbers are equal within the tolerance; infinities and NaN equal themselves only."""
    if math.isnan(expected):
        return math.isnan(found)
    if found == expected:
        return True
    if not math.isfinite(expected):
        return False
    size = abs(expected)
    if size == 0:
        allowed = tolerance
    else:
        # tolerance * |expected|, which grows to `GROWS_TO` only; past 5e10 the loss of doubles is larger than that and
        # takes over.
        allowed = max(tolerance * min(size, GROWS_TO), min(tolerance, _DOUBLE_LOSS) * size)
    # 0 is never close to a number that is not 0: it is what programs print that did not compute.
    return abs(found - expected) <= allowed and (found != 0 or size == 0)


def same_value(found: Any, expected: Any, how: Comparison) -> bool:
    """Return True if a returned value equals the expected one. Both are made of exact builtin types."""
    try:
        return _same(found, expected, how)
    # A value may be nested as deeply as typed JSON allows, and a checker's or test's own one deeper.
    except RecursionError:
        return False


def difference(found: Any, expected: Any, how: Comparison) -> str | None:
    """None where a returned value is the expected one, else both in words."""
    if same_value(found, expected, how):
        return None
    return f"returned {short(found)} where {short(expected)} is expected"


def _same(found: Any, expected: Any, how: Comparison) -> bool:
    # JSON has no tuples, so that a task in JSON cannot ask for one: both kinds equal each other unless
    # `strict_sequences`.
    if isinstance(expected, (list, tuple)):
        if how.strict_sequences:
            kinds = type(found) is type(expected)
        else:
            kinds = isinstance(found, (list, tuple))
        return (
            kinds
            and len(found) == len(expected)
            and all(_same(f, e, how) for f, e in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        # Keys exactly, values within the tolerance; the order of a dict does not count, as in Python.
        same_keys = isinstance(found, dict) and _same_members(found.keys(), expected.keys(), how)
        return same_keys and all(_same(found[k], v, how) for k, v in expected.items())
    if isinstance(expected, (set, frozenset)):
        return type(found) is type(expected) and _same_members(found, expected, how)
    if isinstance(expected, (bool, int, float)):
        return _same_number(found, expected, how)
    return type(found) is type(expected) and bool(found == expected)


def _same_members(found: Collection[Any], expected: Collection[Any], how: Comparison) -> bool:
    """Return True if two sets, or the keys of two dicts, are equal and of equal types at every depth. Numbers in them
    are compared exactly."""
    # Equality of sets first, since it is Python's own; types second: {1} == {True} == {1.0}.
    if len(found) != len(expected) or set(found) != set(expected):
        return False
    return not how.strict_numbers or {_typed(one) for one in found} == {_typed(one) for one in expected}


def _typed(value: Any) -> Any:
    """A member of a set that is equal to another only where the types are, too."""
    if isinstance(value, (tuple, frozenset)):
        return type(value), type(value)(_typed(item) for item in value)
    return type(value), value


def _same_number(value: Any, expected: bool | int | float, how: Comparison) -> bool:
    # A program may answer a float's value exactly.
    if type(value) in (Decimal, Fraction) and type(expected) is float:
        value = float(value)
    if type(value) not in (bool, int, float):
        return False
    if how.strict_numbers:
        if isinstance(expected, bool) or isinstance(value, bool):
            # `is`: True and False are single objects.
            return type(value) is type(expected) and value is expected
        # 2.0 for an expected 2: the task asks for an integer. The other way round, 2 for 2.0, is accepted below.
        if isinstance(expected, int) and not isinstance(value, int):
            return False
    if not isinstance(expected, float):
        return bool(value == expected)
    try:
        return _close(float(value), expected, how.tolerance)
    except OverflowError:  # an int beyond every float
        return False


def short(value: Any, limit: int = 80) -> str:
    """A value in a message; cheap however large it is."""
    if isinstance(value, str):
        text = repr(value[:limit])
        if len(value) <= limit:
            return text
        return f"{text}... ({len(value)} characters)"
    # Writing an int in decimal takes quadratic time, and raises past 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, Iterator):  # its own words are an address
        return "an iterator"
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or with too many digits within
        return f"a {type(value).__name__}"
    if len(text) <= limit:
        return text
    return text[:limit] + "..."
