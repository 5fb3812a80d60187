"""Texts against a rule: a regular expression, a number within a tolerance, the words shared with the gold."""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import (
    AnswerVerifier,
    Fallback,
    Method,
    bare,
    check_not_negative,
    check_threshold,
    graded,
    read_texts,
    unparsable,
    wrong,
)
from rlvr.verifiers.base import Needs

# Matches `the cat`; not `theme`.
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
# Matches `-1,234.5`, `3e-4`, `2 \times 10^{3}`, `3/4`, `50%`; not `abc`.
_NUMBER = re.compile(
    rf"(?P<sign>[-+]\s*)?(?:(?P<number>{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]+)(?![\w.])"
    rf"|\s*(?:\\times|\\cdot|[x*\u00d7\u00b7])\s*10\s*(?:\^|\*\*)\s*\{{?(?P<power>[-+]?[0-9]+)\}}?"
    rf"|\s*/\s*(?P<denominator>{_DIGITS}(?:\.[0-9]*)?))?)\s*(?P<percent>\\?%)?"
)
# Matches `about `, ` apples`; not `2 +`, `x^`. No digits, operators or brackets: anything else beside the number makes
# a formula of it.
_WORDS = re.compile(r"[^0-9+*/=^<>\\{}_()\[\]|\u00b1]*")
# Matches `at least`, `3 dozen`, `half of`; not `apples`, `mostly`.
_CHANGES = re.compile(
    r"\b(?:not|or|maybe|perhaps|either|between|than|least|most|below|above|under|over|plus|minus|times|half|squared"
    r"|cubed|dozen|(?:hundred|thousand|million|billion|trillion|lakh|crore|tenth|hundredth|thousandth)s?"
    "|(?:\u0442\u044b\u0441\u044f\u0447|\u043c\u0438\u043b\u043b\u0438\u043e\u043d"
    "|\u043c\u0438\u043b\u043b\u0438\u0430\u0440\u0434)\\w*|\u0442\u044b\u0441)\\b"
    "|[\u5341\u767e\u5343\u842c\u4e07\u5104\u4ebf\u5146\ubc31\ucc9c\ub9cc\uc5b5\uc870]",
    re.IGNORECASE,
)
"""Words beside a number that make it another one, or several: in English, Russian, Chinese, Japanese and Korean."""


@register_verifier("regex")
@dataclass
class RegexVerifier(AnswerVerifier):
    """The answer matches a regular expression: `pattern`, else `info["pattern"]`, else `task.answer`.

    It runs in a worker process: an answer that makes the pattern backtrack past the time limit scores 0.
    """

    methods: tuple[Method, ...] = ()
    max_length: int = 100_000
    pattern: str = ""
    """The pattern of every task, in the syntax of Python's `re`; empty: each task brings its own."""
    match: Literal["full", "search"] = "full"
    """The part of the answer that the pattern must match: all of it (`full`), or any part (`search`)."""
    ignore_case: bool = False
    """Ignore case."""
    time_limit: float = 5.0
    """Seconds for one answer; one that takes longer scores 0."""

    needs: ClassVar[Needs] = Needs(process=True)

    def __post_init__(self) -> None:
        problem = self._problem(self.pattern) if self.pattern else None
        if problem:
            raise ConfigError(f"regex: {problem}")

    def check_task(self, task: Task) -> str | None:
        pattern = self._pattern(task)
        if not isinstance(pattern, str) or not pattern:
            return 'there is no pattern: set the verifier\'s `pattern`, info["pattern"], or the answer'
        return self._problem(pattern)

    def judge(self, task: Task, answer: str) -> Verdict:
        return Verdict.from_score(self._matches(self._pattern(task), answer), answer=answer)

    def _matches(self, pattern: str, text: str) -> bool:
        compiled = re.compile(pattern, re.IGNORECASE if self.ignore_case else re.NOFLAG)
        if self.match == "full":
            matched = compiled.fullmatch(text)
        else:
            matched = compiled.search(text)
        return matched is not None

    def _pattern(self, task: Task) -> str:
        pattern: str = self.pattern or task.info.get("pattern") or task.answer
        return pattern

    def _problem(self, pattern: str) -> str | None:
        try:
            matches_nothing = self._matches(pattern, "")
        except (re.error, RecursionError, OverflowError) as error:
            return f"the pattern {pattern!r} is no regular expression: {error}"
        # A pattern that matches nothing at all pays any completion, also an empty one.
        if matches_nothing:
            return f"the pattern {pattern!r} matches the empty answer"
        return None


@register_verifier("numeric")
@dataclass
class NumericVerifier(AnswerVerifier):
    """The answer is one number, and |answer - gold| <= max(absolute, relative * |gold|).

    Words around the number (a unit) are ignored; a second number, a formula or a hedge is not. A percentage equals its
    number with or without the division by 100 where only one of answer and gold is written with `%`.
    """

    fallback: Fallback = "none"
    absolute: float = 0.0
    """Absolute error allowed."""
    relative: float = 1e-6
    """Error allowed as a share of the gold."""

    def __post_init__(self) -> None:
        check_not_negative("numeric", absolute=self.absolute, relative=self.relative)

    def check_gold(self, gold: str) -> str | None:
        if read_one_number(gold) is None:
            return f"the answer {gold!r} is not one number"
        return None

    def judge(self, task: Task, answer: str) -> Verdict:
        number = read_one_number(answer)
        if number is None:
            return unparsable("not one number", answer)
        golds = [read_one_number(gold) for gold in read_texts(task.answer)]
        if any(gold is not None and self._equal(number, gold) for gold in golds):
            return Verdict.from_score(1.0, answer=answer)
        return wrong("", answer)

    def same_answer(self, first: str, second: str) -> bool:
        one = read_one_number(first)
        other = read_one_number(second)
        if one and other:
            return self._equal(one, other)
        return first.strip() == second.strip()

    def _equal(self, answer: tuple[float, bool], gold: tuple[float, bool]) -> bool:
        (value, percent) = answer
        (wanted, wanted_percent) = gold
        # With a percent sign on one side both readings count: 50% is 50, where the unit is understood, and 0.5.
        pairs = [(value, wanted)]
        if percent != wanted_percent:
            pairs.append((value / 100, wanted) if percent else (value, wanted / 100))
        return any(abs(a - b) <= max(self.absolute, self.relative * abs(b)) for a, b in pairs)


def read_one_number(text: str) -> tuple[float, bool] | None:
    """The only number in `text` and whether it is a percentage; None where there is none, or something beside it."""
    text = bare(text).replace("\u2212", "-").replace("{,}", ",")
    match = _NUMBER.search(text)
    if match is None:
        return None
    before = text[: match.start()]
    after = text[match.end() :]
    if not (_WORDS.fullmatch(before) and _WORDS.fullmatch(after)) or _CHANGES.search(before + " " + after):
        return None
    if before[-1:].isalnum() or before[-1:] in ("-", ".") or (after[:1] in ("-", ",", ".") and after[1:2].isalnum()):
        return None
    if before and (match["sign"] or "").endswith(" "):  # a dash between words, not a sign
        return None
    try:
        # `int()` of a long exponent raises ValueError above 4,300 digits: that is no number. One text, read once: a
        # product with a power of ten would round twice, and 5e-324 to 0.
        exponent = int(match["exponent"] or match["power"] or 0)
        value = float(f"{match['number'].replace(',', '')}e{exponent}")
        value /= float((match["denominator"] or "1").replace(",", ""))
    except (ZeroDivisionError, ValueError):
        return None
    # float() of a text of 400 digits, or with a large exponent, is infinite, without an error.
    if value in (float("inf"), float("-inf")) or value != value:
        return None
    return (-value if (match["sign"] or "").startswith("-") else value), match["percent"] is not None


@register_verifier("token_f1")
@dataclass
class TokenF1Verifier(AnswerVerifier):
    """F1 of the words of the answer and of the nearest gold, normalised as SQuAD does (Rajpurkar et al. 2016).

    Normalised: lower case, no ASCII punctuation, no articles, single spaces. A gold of yes, no or noanswer wants
    exactly that word (HotpotQA, Yang et al. 2018).
    """

    threshold: float | None = None
    """From this score on an answer is correct, below it is wrong; null: the score itself."""

    def __post_init__(self) -> None:
        check_threshold("token_f1", self.threshold)

    def check_gold(self, gold: str) -> str | None:
        if squad_words(gold):
            return None
        return f"the answer {gold!r} has no word"

    def judge(self, task: Task, answer: str) -> Verdict:
        words = squad_words(answer)
        return graded(
            max(token_f1(words, squad_words(gold)) for gold in read_texts(task.answer)), answer, self.threshold
        )

    def same_answer(self, first: str, second: str) -> bool:
        return squad_words(first) == squad_words(second)


def squad_words(text: str) -> list[str]:
    """The words that SQuAD compares."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", kept).split()


def token_f1(said: list[str], gold: list[str]) -> float:
    """2PR / (P + R) over the multisets of words."""
    # HotpotQA evaluation script: yes, no and noanswer get no partial credit.
    if said != gold and any(words in (["yes"], ["no"], ["noanswer"]) for words in (said, gold)):
        return 0.0
    shared = (Counter(said) & Counter(gold)).total()
    if shared:
        # F1 = 2PR / (P + R) with P = shared / len(said) and R = shared / len(gold).
        return 2 * shared / (len(said) + len(gold))
    return 0.0
