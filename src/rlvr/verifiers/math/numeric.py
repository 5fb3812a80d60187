r"""Plain numbers, read exactly: integers, decimals, fractions, mixed numbers, percents, scientific notation.

`read_number` takes a cleaned answer (see latex.clean) with its currency sign, label (`x =`) and unit, and gives an exact
Fraction, in microseconds and without SymPy. What is not one plain number (`6 \cdot 7`, `41 = 42`, `42 or 41`) is None:
nothing is evaluated here, and no exponent or digit string is large enough to cost anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Digits of a literal, and size of a decimal exponent, beyond which a text is no plain number."""

_LABEL = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'?(?:\([\w, ]*\))?\s*=(?!=)\s*|\\text\s*\{[^{}]*\}\s*=\s*")
_SIGN = re.compile(r"\s*([+-]?)\s*(?:(?:\\?\$|[€£¥₹]|\\pounds|USD|EUR|Rs\.?)\s*)?([+-]?)\s*")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_SPACED = r"\d{1,3}(?: \d{3})+(?:\.\d*)?(?![\d/])"
_OPERAND = re.compile(rf"\s*([+-]?)\s*({_PLAIN})\s*")
_FRACTION = re.compile(
    rf"(?:(\d+)\s*)?\\frac\s*(?:\{{([^{{}}]*)\}}|(\d))\s*(?:\{{([^{{}}]*)\}}|(\d))|(?:(\d+)\s+)?({_PLAIN})\s*/\s*({_PLAIN})"
)
_POWER_OF_TEN = re.compile(
    rf"(?:({_PLAIN})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*(?:\{{\s*([+-]?\s*\d+)\s*\}}|(\d))|({_PLAIN})[eE]([+-]?\d+)"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
_DECIMAL = re.compile(rf"{_SPACED}|{_PLAIN}")

_SCALES = {
    "%": Fraction(1, 100),
    "percent": Fraction(1, 100),
    "pct": Fraction(1, 100),
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*[CF]?\s*")
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"\\?%|\\?\$|[€£¥₹]|[A-Za-z]+(?:\s*\^\s*\{?-?[23]\}?)?")
_BETWEEN_UNITS = re.compile(r"[\s/.\-]*")
_SHORT_UNITS = re.compile(
    r"[mcdk]m|mi|ft|yd|in|k?g|mg|lbs?|oz|[md]l|sq|hrs?|mins?|secs?|ms|mph|kph|fps|[ap]m|st|nd|rd|th|[km]?hz|pts",
    re.IGNORECASE,
)
"""Units that may stand directly after a number, and that a variable's name is not."""
_NOT_UNITS = re.compile(
    r"[ijexyzn]|or|and|not|no|maybe|perhaps|possibly|either|then|but|else|pi|sqrt|root|sin|cos|tan|cot|sec|csc|log|exp|theta|alpha|beta|phi"
    r"|mod|inf|infinity|plus|minus|times|over|squared|cubed|half|halves|quarters?|factorial"
    r"|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|millionths?",
    re.IGNORECASE,
)
"""Words after a number that say something else than its unit."""


@dataclass(frozen=True)
class Number:
    """An exact number as it was written.

    `scale` is what a percent sign or a word like `million` multiplies by: 28% may mean 28 or 0.28, and is equal to
    both, but not to 0.28%. `is_fraction` says that a denominator was written.
    """

    value: Fraction
    scale: Fraction = Fraction(1)
    is_fraction: bool = False

    def equals(self, other: Number, tolerance: float = 0.0) -> bool:
        """Equality, exact by default; `tolerance` is relative to this number."""
        if self.scale == other.scale:
            return self._near(self.value, other.value, tolerance)
        mine, others = {self.value, self.value * self.scale}, {other.value, other.value * other.scale}
        return any(self._near(a, b, tolerance) for a in mine for b in others)

    @staticmethod
    def _near(gold: Fraction, answer: Fraction, tolerance: float) -> bool:
        return gold == answer or (tolerance > 0 and abs(gold - answer) <= Fraction(tolerance) * abs(gold))


def read_number(text: str) -> Number | None:
    """The plain number that the cleaned `text` writes, or None."""
    if text.isdecimal() and len(text) <= MAX_DIGITS:
        return Number(Fraction(int(text)))
    label = _LABEL.match(text)
    text = text[label.end() :] if label else text
    if text[:1] == "(" and text[-1:] == ")":
        text = text[1:-1]
    sign = _SIGN.match(text)
    assert sign is not None  # everything in it is optional
    if sign[1] and sign[2]:
        return None
    for pattern, read in _FORMS:
        match = pattern.match(text, sign.end())
        if match is not None:
            found, rest = read(match), text[match.end() :]
            scale = _scale(rest) if found is not None else None
            if found is not None and scale is not None:
                value = -found if "-" in (sign[1], sign[2]) else found
                return Number(value, scale, pattern is _FRACTION)
    return None


def _scale(rest: str) -> Fraction | None:
    """What the text after a number multiplies it by: 1 for nothing or a unit; None when it is something else."""
    if not rest:
        return Fraction(1)
    if degrees := _DEGREES.fullmatch(rest):
        rest = rest[degrees.end() :]
    plain = _TEXT.sub(r" \1 ", rest)
    wrapped, scale, at, words, only_scales = plain != rest, Fraction(1), 0, 0, True
    while True:
        gap = _BETWEEN_UNITS.match(plain, at)
        assert gap is not None
        at = gap.end()
        if at == len(plain):
            return None if "/" in gap[0] or "-" in gap[0] else scale
        unit = _UNIT.match(plain, at)
        if unit is None or words == 4:
            return None
        word = unit[0].lstrip("\\")
        only_scales = only_scales and word.lower() in _SCALES
        if only_scales:
            scale *= _SCALES[word.lower()]
        elif word[0].isalpha() and not _is_unit(
            re.sub(r"[^A-Za-z]", "", word), wrapped, spaced=gap.end() > gap.start()
        ):
            return None
        at, words = unit.end(), words + 1


def _is_unit(word: str, wrapped: bool, spaced: bool) -> bool:
    if _SHORT_UNITS.fullmatch(word):
        return True
    if _NOT_UNITS.fullmatch(word):
        return False
    return wrapped or (spaced and len(word) > 2 and any(v in word.lower() for v in "aeiou"))


def _decimal(text: str | None) -> Fraction | None:
    if text is None or len(text) > MAX_DIGITS:
        return None
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "0")


def _operand(text: str | None) -> Fraction | None:
    match = _OPERAND.fullmatch(text or "")
    value = _decimal(match[2]) if match else None
    return -value if match and value is not None and match[1] == "-" else value


def _read_fraction(match: re.Match[str]) -> Fraction | None:
    whole, above, below = match[1] or match[6], match[2] or match[3] or match[7], match[4] or match[5] or match[8]
    top, bottom = _operand(above), _operand(below)
    if top is None or not bottom or (whole and (top < 0 or bottom < 0 or len(whole) > MAX_DIGITS)):
        return None
    return top / bottom + int(whole or 0)


def _read_power(match: re.Match[str]) -> Fraction | None:
    mantissa, exponent = match[1] or match[4] or "1", (match[2] or match[3] or match[5]).replace(" ", "")
    if len(exponent) > 6 or abs(int(exponent)) > MAX_DIGITS:
        return None
    value = _decimal(mantissa)
    return None if value is None else value * Fraction(10) ** int(exponent)


def _read_repeating(match: re.Match[str]) -> Fraction | None:
    whole, fixed, cycle = match.groups()
    if len(match[0]) > MAX_DIGITS:
        return None
    shift = 10 ** len(fixed)
    return Fraction(int(whole + fixed or "0"), shift) + Fraction(int(cycle), shift * (10 ** len(cycle) - 1))


_FORMS = (
    (_FRACTION, _read_fraction),
    (_POWER_OF_TEN, _read_power),
    (_REPEATING, _read_repeating),
    (_DECIMAL, lambda match: _decimal(match[0])),
)
