r"""Formulas between math delimiters, and numbers, in the text of a completion or a prompt."""

# ruff: noqa: RUF001 - words of other scripts are part of what is read here

from __future__ import annotations

import re
from collections.abc import Iterator

# Matches `$$`, `\(`, `\]`, `\$`; not `x`. An escaped dollar is one token and delimits nothing; a line break ends an
# inline formula.
_FORMULA_MARK = re.compile(r"\\\\|\\[\[\]()]|\\.|\$\$?|\n", re.DOTALL)
_CLOSES = {"$": "$", "$$": "$$", "\\[": "\\]", "\\(": "\\)"}
CJK = "\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
"""Letters of scripts that put no space between a word and a number."""
_GLUED = rf"[^\W{CJK}]"
"""A letter, digit or underscore of the other scripts: a digit behind one belongs to a name (`x2`)."""
# Separators of thousands: ASCII, Arabic, and full-width where three digits follow, since that one also separates a
# list.
_COMMA = r"[,\u066c]|\uff0c(?=\d{3}(?!\d))"
# Decimal points: ASCII, Arabic, full-width.
_POINT = "[.\u066b\uff0e]"
# Spaces that may stand between groups of three digits: space, no-break, thin, narrow no-break (ISO 31-0).
_THIN = "[ \u00a0\u2009\u202f]"
_MINUS = "负|負|零下|マイナス|마이너스|영하|минус|minus|negative|ناقص|سالب|ऋण|माइनस"
"""Words for the sign of the number behind them."""
_SCALE = (
    "percent|pct|million|billion|trillion|thousand|hundred|dozen|тыс(?:яч[аи]?)?|миллион(?:а|ов)?|миллиард(?:а|ов)?"
    "|триллион(?:а|ов)?|млн|млрд|трлн"
    "|процент(?:а|ов)?|ألف|آلاف|الف|مليون|ملايين|مليار|هزار|میلیون|میلیارد|हज़ार|हजार|लाख|करोड़|करोड़"
)
"""Words that multiply the number before them, as units.SCALES knows them."""
_LETTERS = "A-Za-z\u0400-\u04ff\u0600-\u06ff\u0900-\u097f"
# Matches `-1,234.5`, `3/4`, `百分之 20`, `50%`; not `x2`. The lookbehinds refuse a digit that belongs to a name
# (`x2`), to a power (`10^5`) or to a decimal.
_NUMBER = re.compile(
    rf"(?:(?<!\d)(?<!\d )(?<![{_LETTERS}])(?P<minus>{_MINUS})\s*(?:\\?[$€£¥₹]\s?)?"
    rf"|(?:(?<!{_GLUED})(?<!\))[-+\u2212\uff0d\uff0b](?:\\?[$€£¥₹]\s?)?)?(?<!{_GLUED})(?<![\\^.\u066b\uff0e])"
    r"(?<!(?<![是为為はが:：])第))"  # `第7题` is the seventh; `答案是第7` still answers
    r"(?P<number>(?P<below>\d+)\s*(?:分之|分の|분의)\s*(?P<above>\d+)|(?:百分之|백분의)\s*(?P<percent>\d+(?:\.\d+)?)"
    rf"|(?:\d{{1,3}}(?:{_THIN}\d{{3}})+(?!\d)|\d(?:{_COMMA}|\d)*(?:{_POINT}\d+)?|{_POINT}\d+)(?:[/\u2044]\d+)?"
    rf"(?:\s*(?:\\?[%\uff05\u066a]|{_SCALE})(?![{_LETTERS}])"
    r"|\s*[\u5341\u767e\u5343\u842c\u4e07\u5104\u4ebf\u5146\ub9cc\uc5b5\ucc9c\ubc31]+)?)",
    re.IGNORECASE,
)


def formulas(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield where each formula between math delimiters begins, where it ends, and where its closing delimiter ends; in
    order."""
    # An opening delimiter that nothing closes is text: it hides no formula behind it, and costs no search to the end.
    last = {mark: text.rfind(closing) for mark, closing in _CLOSES.items()}
    opened = ""
    start = 0
    for token in _FORMULA_MARK.finditer(text):
        mark = token[0]
        if opened and mark == _CLOSES[opened]:
            if text[start : token.start()].strip():
                yield start, token.start(), token.end()
            opened = ""
        elif mark == "\n":
            opened = "" if opened in ("$", "\\(") else opened  # a formula in a line does not go on in the next
        # A `$` that another delimiter follows was a currency sign: `$5 and \(x\) for $3`.
        elif mark in _CLOSES and (not opened or opened == "$") and last[mark] > token.start():
            opened = mark
            start = token.end()


def last_math(text: str, numbers: bool) -> str | None:
    """The last formula between math delimiters; with `numbers` the last number, where that comes later."""
    spans = list(formulas(text))
    start, stop, end = spans[-1] if spans else (0, 0, 0)
    number = None
    # From the end of the last formula on, so that a number inside a formula does not win over the formula.
    for match in _NUMBER.finditer(text, end) if numbers else ():
        number = _as_written(match)
    if number is not None:
        return number.strip().rstrip(",")
    return text[start:stop].strip() if spans else None


def _as_written(number: re.Match[str]) -> str:
    """A number in the text, with digits and signs for the words that say a sign, a fraction or a percentage."""
    # Chinese, Japanese and Korean say the denominator first: `4分之3` is 3/4.
    if number["below"]:
        value = f"{number['above']}/{number['below']}"
    elif number["percent"]:
        value = f"{number['percent']}%"
    else:
        value = number["number"]
    if number["minus"]:
        sign = "-"
    else:
        sign = number[0][: number.start("number") - number.start()].strip("\\ ")
    return sign + value
