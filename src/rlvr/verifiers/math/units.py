"""Units of measurement and the words after a value: which can be converted, which are prose, which change the meaning."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

_BASE: dict[str, dict[str, int | str]] = {
    "length": {"mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": 1, "meter": 1, "metre": 1, "millimeter": "1/1000", "centimeter": "1/100",
               "centimetre": "1/100", "km": 1000, "kilometer": 1000, "kilometre": 1000, "inch": "127/5000", "in": "127/5000",
               "inche": "127/5000", "ft": "381/1250", "foot": "381/1250", "feet": "381/1250", "yd": "1143/1250", "yard": "1143/1250",
               "mi": "201168/125", "mile": "201168/125"},
    "time": {"ms": "1/1000", "second": 1, "sec": 1, "s": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "h": 3600, "day": 86400,
             "week": 604800},
    "years": {"month": 1, "year": 12, "yr": 12, "decade": 120, "century": 1200, "centurie": 1200},
    "mass": {"mg": "1/1000000", "g": "1/1000", "gram": "1/1000", "kg": 1, "kilogram": 1, "tonne": 1000, "oz": "45359237/1600000000",
             "ounce": "45359237/1600000000", "lb": "45359237/100000000", "pound": "45359237/100000000"},
    "volume": {"ml": "1/1000", "milliliter": "1/1000", "l": 1, "liter": 1, "litre": 1},
    "money": {"dollar": 1, "cent": "1/100", "usd": 1}, "euro": {"euro": 1, "eur": 1}, "sterling": {"sterling": 1}, "yen": {"yen": 1}, "rupee": {"rupee": 1},
    "temperature C": {"degrees C": 1}, "temperature F": {"degrees F": 1},
    "morning": {"am": 1, "a.m": 1}, "afternoon": {"pm": 1, "p.m": 1},
}  # fmt: skip
_PREFIXES: dict[str, int | str] = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "c": "1/100",
    "m": "1/1000",
    "n": "1/1000000000",
    "d": "1/10",
}
_PHYSICAL = {
    "N": "force",
    "W": "power",
    "J": "energy",
    "V": "voltage",
    "A": "current",
    "K": "temperature",
    "Pa": "pressure",
    "Hz": "frequency",
    "L": "volume",
    "l": "volume",
    "m": "length",
    "s": "time",
    "eV": "electron energy",
    "mol": "amount",
    "Wh": "work",
}
_UNITS = {
    prefix + name: (quantity, Fraction(factor))
    for name, quantity in _PHYSICAL.items()
    for prefix, factor in _PREFIXES.items()
} | {"g": ("mass", Fraction(1, 1000))}
_UNITS |= {name: (dimension, Fraction(factor)) for dimension, names in _BASE.items() for name, factor in names.items()}
_ALIASES = {"mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "sq": "square", "cc": "cm^3"}
SCALES = {
    "percent": Fraction(1, 100), "percentage": Fraction(1, 100), "pct": Fraction(1, 100), "dozen": Fraction(12), "hundred": Fraction(100),
    "thousand": Fraction(10**3), "million": Fraction(10**6), "billion": Fraction(10**9), "trillion": Fraction(10**12),
    **dict.fromkeys(["процент", "процента", "процентов"], Fraction(1, 100)),
    **dict.fromkeys(["тыс", "тысяч", "тысяча", "тысячи"], Fraction(10**3)),
    **dict.fromkeys(["миллион", "миллиона", "миллионов"], Fraction(10**6)),
    **dict.fromkeys(["миллиард", "миллиарда", "миллиардов"], Fraction(10**9)),
    "十": Fraction(10), "百": Fraction(100), "千": Fraction(10**3),
    **dict.fromkeys("万萬만", Fraction(10**4)), **dict.fromkeys("亿億억", Fraction(10**8)), "兆": Fraction(10**12),
}  # fmt: skip
_MEANINGFUL = re.compile(
    r"\b(?:or|and|not|no|maybe|perhaps|possibly|either|alternatively|unless|except|but|else|instead|rather|wrong|incorrect|approximately|about|minus|plus"
    r"|times|divided|over|squared|cubed|more|less|than|at|least|most|up|between|half|halves|thirds?|fourths?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?"
    r"|tenths?|hundredths?|thousandths?|modulo|mod)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"([A-Za-z.]+(?: [CF]\b)?)(?:\^(-?\d))?|/|\*")


def changes_meaning(words: str) -> bool:
    """Whether words after a value say something else than its unit or what it counts."""
    return _MEANINGFUL.search(words) is not None


def other_angle(one: str, other: str) -> bool:
    """Whether one unit is degrees and the other radians."""
    kinds = {"degree": 1, "deg": 1, "radian": 2, "rad": 2}
    found = {kinds.get(unit.lower().removesuffix("s"), 0) for unit in (one, other)}
    return found == {1, 2}


@functools.lru_cache(maxsize=1024)
def dimension(unit: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """The powers of the dimensions of a unit, and its size in base units; None where a word of it is not known."""
    powers: dict[str, int] = {}
    size, sign, wanted = Fraction(1), 1, 1
    words = " ".join(_ALIASES.get(word, word) for word in unit.split())
    for match in _WORD.finditer(words):
        word = match[1]
        if word in (None, "per", "a", "an"):
            sign = -1 if match[0] in ("/", "per") else sign
            continue
        if word in ("square", "cubic"):
            wanted = 2 if word == "square" else 3
            continue
        found = _UNITS.get(word) or _UNITS.get(word.lower().removesuffix("s").rstrip(".")) or _UNITS.get(word.lower())
        if found is None:
            return None
        power = sign * wanted * int(match[2] or 1)
        powers[found[0]] = powers.get(found[0], 0) + power
        size *= found[1] ** power
        wanted = 1
    return tuple(sorted((name, power) for name, power in powers.items() if power)), size
