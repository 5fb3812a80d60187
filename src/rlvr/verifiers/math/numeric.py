r"""Plain numbers, read exactly: integers, decimals, fractions, mixed numbers, percents, scientific notation.

`read_number` takes a cleaned answer (see latex.clean) with its currency sign, label (`x =`) and unit, and gives an
exact Fraction, in microseconds and without SymPy. What is not one plain number (`6 \cdot 7`, `41 = 42`, `42 or 41`) is
None: nothing is evaluated here, and no exponent or digit string is large enough to cost anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rlvr.verifiers.math.rules import Percent, Rules
from rlvr.verifiers.math.units import SCALES, conversion, dimension
from rlvr.verifiers.math.vocabulary import CURRENCIES

# Python converts at most 4,300 digits between int and str; a thousand is more than any answer has.
MAX_DIGITS = 1000
"""Digits of a literal, and size of a decimal exponent, beyond which a text is no plain number."""

ROUNDED_DIGITS = 12
"""A decimal of so many significant digits equals the exact number that it is the rounding of: more than a calculator
shows and a text remembers (2.718281828 is not e)."""

_ONE = Fraction(1)
_PERCENT = Fraction(1, 100)
# Matches `x = `, `f(x) = `, `\text{Area} = `; not `x == 5`, `5 = x`.
_LABEL = re.compile(r"(\\?[A-Za-z]+(?:_\{?\w+\}?)?'?(?:\([\w, ]*\))?\s*|\\text\s*\{[^{}]*\}\s*)=(?!=)\s*")
_SIGN = re.compile(r"\s*([+-]?)\s*(?:(\\?\$|[€£¥₹]|\\pounds|USD|EUR|Rs(?=\.?))\.?\s*)?([+-]?)\s*")
_PLAIN = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_SPACED = r"\d{1,3}(?: \d{3})+(?:\.\d*)?(?![\d/])"
# Matches `-1,234.5`, ` 3 `; not `1,23`, `x`.
_OPERAND = re.compile(rf"\s*([+-]?)\s*({_PLAIN})\s*")
# Matches `\frac{1}{2}`, `1\frac12`, `1 1/2`; not `\frac{1}{2`, `0.5`.
_FRACTION = re.compile(
    rf"(?:(\d+)\s*)?\\frac\s*(?:\{{([^{{}}]*)\}}|(\d))\s*(?:\{{([^{{}}]*)\}}|(\d))"
    rf"|(?:(\d+)\s+)?({_PLAIN})\s*/\s*({_PLAIN})"
)
# Matches `1.5 \times 10^{3}`, `10^5`, `1.5e3`; not `10^x`, `3^5`.
_POWER_OF_TEN = re.compile(
    rf"(?:({_PLAIN})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*(?:\{{\s*([+-]?\s*\d+)\s*\}}|(\d))"
    rf"|({_PLAIN})[eE]([+-]?\d+)"
)
# Matches `0.1\overline{6}`, `.\bar{3}`; not `0.16`.
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
# Matches `1 234.5`, `1,234`, `.5`; not `x`.
_DECIMAL = re.compile(rf"{_SPACED}|{_PLAIN}")

_SCALES = {"%": Fraction(1, 100), **SCALES}
# Matches `^\circ`, `^{\circ} C`; not `^2`.
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*([CF](?![A-Za-z]))?\s*")
# Matches `th`, `^{\text{th}}`; not `x`.
_ORDINAL = re.compile(r"\s*\^?\s*\{?\s*(?:\\(?:text|mathrm)\s*)?\{?\s*(?:st|nd|rd|th)\s*\}{0,2}\s*", re.IGNORECASE)
# Matches `\text{cm}`, `\mathrm{m}`; not `\frac{m}{s}`.
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
# Matches `cm^2`, `%`, `米`; not `5`.
_UNIT = re.compile(
    r"(\\?%|\\?\$|[€£¥₹]|[A-Za-z]+|[\u5341\u767e\u5343\u842c\u4e07\u5104\u4ebf\u5146\ub9cc\uc5b5\ucc9c\ubc31]"
    r"|[\u3005-\u30ff\u4e00-\u9fff\uac00-\ud7af]+|[\u0400-\u04ff]+|[\u0600-\u06ff]+"
    r"|[\u0900-\u097f]+)(?:\s*\^\s*\{?\s*(-?[1-4])\s*\}?)?"
)
_BETWEEN_UNITS = re.compile(r"[\s/.\-]*")
# Matches `km`, `hrs`, `pm`; not `ab`.
_SHORT_UNITS = re.compile(
    r"[mcdk]m|mi|ft|yd|in|kg|mg|lbs?|oz|[md]l|sq|hrs?|mins?|secs?|ms|mph|kph|fps|[ap]m|st|nd|rd|th|[km]?hz|pts",
    re.IGNORECASE,
)
"""Units that may stand directly after a number, and that a variable's name is not."""
_NOT_UNITS = re.compile(
    r"[ijexyzn]|or|and|not|no|maybe|perhaps|possibly|either|then|but|else|pi|sqrt|root|sin|cos|tan|cot|sec|csc|log|exp"
    r"|theta|alpha|beta|phi|mod|inf|infinity|plus|minus|times|over|squared|cubed|half|halves|quarters?|factorial"
    r"|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|millionths?",
    re.IGNORECASE,
)
"""Words after a number that say something else than its unit."""


@dataclass(frozen=True)
class PlainNumber:
    """An exact number as it was written.

    `scale` is what a percent sign or a word like `million` multiplies by. `is_fraction` says that a denominator was
    written; `places` is how many decimals were, None where the number is no plain decimal.
    """

    value: Fraction
    scale: Fraction = _ONE
    is_fraction: bool = False
    places: int | None = None
    unit: str = ""
    """The words of its unit, as `units.dimension` reads them."""
    label: str = ""
    """Name that the number is given (`x`)."""

    def equals(self, answer: PlainNumber, rules: Rules) -> bool:
        """Return True if `answer` is this gold number."""
        if rules.units == "required" and self.unit and not answer.unit:
            return False
        factor = _ONE if rules.units == "ignored" else conversion(self.unit, answer.unit, rules.nouns)
        if factor is None:
            return False
        golds = self._readings(answer, rules.percent)
        answers = answer._readings(self, rules.percent)
        if self.scale not in (_ONE, _PERCENT) and answer.scale == _ONE:
            golds += (self.value,)  # the gold's scale word, like its unit, may be left out
        return any(self._near(answer, a, b * factor, rules.tolerance) for a in golds for b in answers)

    def _readings(self, other: PlainNumber, percent: Percent) -> tuple[Fraction, ...]:
        """The values of the number beside `other`: 28% may be 0.28, or 28 where the unit is understood; 5 million is
        5000000."""
        if self.scale == other.scale:
            return (self.value,)
        if self.scale != _PERCENT or other.scale != _ONE:
            return (self.value * self.scale,)
        fraction = self.value / 100
        return {"either": (self.value, fraction), "number": (self.value,), "fraction": (fraction,)}[percent]

    def _near(self, answer: PlainNumber, gold: Fraction, value: Fraction, tolerance: float) -> bool:
        if gold == value:
            return True
        # Relative to the gold, so that the answer cannot widen its own margin.
        if tolerance > 0 and abs(gold - value) <= Fraction(tolerance) * abs(gold):
            return True
        return _rounds(self, answer, gold, value) or _rounds(answer, self, value, gold)


def _rounds(exact: PlainNumber, rounded: PlainNumber, exact_value: Fraction, rounded_value: Fraction) -> bool:
    """Return True if `rounded` is a decimal for `exact`, which is no decimal or one of more decimals."""
    if rounded.places is None or (exact.places is not None and exact.places <= rounded.places):
        return False
    # `12.34%` is 0.1234: beside a value without the sign it has two decimals more.
    places = rounded.places + 2 * (rounded_value * 100 == rounded.value)  # a percent has two decimals more
    if places == 0:  # an integer is what it says
        return False
    return is_rounding(exact_value, rounded_value, places)


def is_rounding(exact: Any, decimal: Fraction, places: int) -> bool:
    """Return True if a decimal of `places` decimals is the real number `exact` (Fraction or mpf), written to its
    digits.

    It has 12 or more significant digits and is `exact` rounded or cut off there; or it is what programs print for the
    double nearest to `exact`, the last of whose 16 or 17 digits may be off.
    """
    written = abs(decimal) * Fraction(10) ** places
    if written < 10 ** (ROUNDED_DIGITS - 1) or written.denominator != 1 or (exact > 0) != (decimal > 0):
        return False
    units = abs(exact) * 10**places if places >= 0 else abs(exact) / 10**-places
    missing = units - int(written)
    # Units of the last digit: -0.5 to 0.5 is rounding, 0 to 1 is cutting off.
    if -0.5 <= missing < 1:
        return True
    # A double is near its number, and outside of these bounds it has fewer digits or none.
    if abs(missing) > 10 or not 1e-300 < abs(decimal) < 1e300:
        return False
    nearest = float(exact)
    # What Python and C print for a double: the shortest text that reads back as it, and 17 significant digits (IEEE
    # 754).
    return decimal in (Fraction(repr(nearest)), Fraction(f"{nearest:.17g}"))


def decimal_places(text: str) -> int | None:
    """Decimals of a number as written, `2.50` or `2.5e-3`; negative where the last digit is a ten or more, None without
    a point."""
    mantissa, _, exponent = text.lower().partition("e")
    decimals = mantissa.partition(".")[2]
    if decimals:
        return len(decimals) - int(exponent or 0)
    return None


def read_number(text: str, letters: bool = False) -> PlainNumber | None:
    """The plain number that the cleaned `text` writes, or None. With `letters` a letter after it may be a unit (`5 m`,
    `5m`)."""
    if text.isdecimal() and len(text) <= MAX_DIGITS:
        return PlainNumber(Fraction(int(text)), places=0)
    label = _LABEL.match(text)
    text = text[label.end() :] if label else text
    if text[:1] == "(" and text[-1:] == ")":
        if "," in text:  # a tuple: in brackets a comma separates
            return None
        text = text[1:-1]
    sign = _SIGN.match(text)
    assert sign is not None  # every group of the pattern is optional, so it always matches
    # `-$-5`: a sign on both sides of the currency is no number.
    if sign[1] and sign[3]:
        return None
    for pattern, read in _FORMS:
        match = pattern.match(text, sign.end())
        if match is not None:
            number = read(match)
            rest = text[match.end() :]
            measure = _measure(rest, sign[2], letters) if number is not None else None
            if number is not None and measure is not None:
                value = -number if "-" in (sign[1], sign[3]) else number
                places = _places(match) if pattern in (_DECIMAL, _POWER_OF_TEN) else None
                return PlainNumber(
                    value, measure[0], pattern is _FRACTION, places, measure[1], label[1].strip() if label else ""
                )
    return None


def _measure(rest: str, currency: str | None, letters: bool) -> tuple[Fraction, str] | None:
    """Return the factor and the unit that the text after a number writes; None if it is something else than a unit."""
    currency = currency.lstrip("\\") if currency else ""
    words = [CURRENCIES.get(currency, currency)] if currency else []
    if degrees := _DEGREES.match(rest):
        words.append(f"degrees {degrees[1]}" if degrees[1] else "degrees")
        rest = rest[degrees.end() :]
    elif ordinal := _ORDINAL.match(rest):
        rest = rest[ordinal.end() :] if not rest[ordinal.end() :][:1].isalpha() else rest
    if not rest:
        return _ONE, " ".join(words)
    plain = _TEXT.sub(r" \1 ", rest)
    wrapped = plain != rest
    scale = _ONE
    at = 0
    count = 0
    only_scales = True
    while True:
        gap = _BETWEEN_UNITS.match(plain, at)
        assert gap is not None
        at = gap.end()
        if at == len(plain):
            # `5/` or `5-`: something is missing behind the sign.
            if "/" in gap[0] or "-" in gap[0] or ".." in gap[0]:
                return None
            return (scale, " ".join(words))
        unit = _UNIT.match(plain, at)
        # More than five words behind a number are a sentence.
        if unit is None or count == 5:
            return None
        word = unit[1].lstrip("\\")
        at = unit.end()
        count = count + 1
        only_scales = only_scales and word.lower() in _SCALES
        if only_scales:
            scale *= _SCALES[word.lower()]
            continue
        is_letter = ("/" in gap[0] or letters) and dimension(word) is not None
        if word[0].isalpha() and not is_letter and not _is_unit(word, wrapped, spaced=gap.end() > gap.start()):
            return None
        words += ["/"] if "/" in gap[0] else []
        words.append(CURRENCIES.get(word, word) + (f"^{unit[2]}" if unit[2] else ""))


def _is_unit(word: str, wrapped: bool, spaced: bool) -> bool:
    if _SHORT_UNITS.fullmatch(word) or not word.isascii():
        return True
    if _NOT_UNITS.fullmatch(word):
        return False
    if wrapped or (len(word) > 1 and dimension(word) is not None):
        return True
    return spaced and len(word) > 2 and any(v in word.lower() for v in "aeiou")


def _decimal(text: str | None) -> Fraction | None:
    if text is None or len(text) > MAX_DIGITS:
        return None
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") or "0")


def _operand(text: str | None) -> Fraction | None:
    match = _OPERAND.fullmatch(text or "")
    value = _decimal(match[2]) if match else None
    if match and value is not None and match[1] == "-":
        return -value
    return value


def _read_fraction(match: re.Match[str]) -> Fraction | None:
    whole = match[1] or match[6]
    above = match[2] or match[3] or match[7]
    below = match[4] or match[5] or match[8]
    top = _operand(above)
    bottom = _operand(below)
    if top is None or not bottom or (whole and (top < 0 or bottom < 0 or len(whole) > MAX_DIGITS)):
        return None
    return top / bottom + int(whole or 0)


def _read_power(match: re.Match[str]) -> Fraction | None:
    mantissa = match[1] or match[4] or "1"
    exponent = (match[2] or match[3] or match[5]).replace(" ", "")
    # The length first: int() of a long digit string takes quadratic time.
    if len(exponent) > 6 or abs(int(exponent)) > MAX_DIGITS:
        return None
    value = _decimal(mantissa)
    return None if value is None else value * Fraction(10) ** int(exponent)


def _places(match: re.Match[str]) -> int | None:
    """Decimals of a plain decimal, or of one with a power of ten."""
    if match.re is _DECIMAL:
        return len(match[0].partition(".")[2])
    exponent = (match[2] or match[3] or match[5]).replace(" ", "")
    return decimal_places(f"{match[1] or match[4] or 1}e{exponent}")


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
