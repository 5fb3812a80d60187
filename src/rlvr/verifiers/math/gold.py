r"""Gold answers: what a task's `answer` may be, read once.

A number, a text (a bare answer, or a solution that ends in `#### 72`, `\boxed{72}` or "the answer is 72"), a list of which
any one is right, or `{"all": [...]}`, a list of which all are asked for.

Invariant: `read_golds` never raises; `problem` says what cannot be used.
"""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.verifiers import extraction
from rlvr.verifiers.math.latex import balanced, clean
from rlvr.verifiers.math.letters import is_product_of_letters, read
from rlvr.verifiers.math.numeric import Number, read_number
from rlvr.verifiers.math.tokens import Unreadable, starts_with_function
from rlvr.verifiers.math.vocabulary import FUNCTIONS

FLOAT_DIGITS = 12
"""Significant digits of a gold that is a float: 0.1 + 0.2 is meant to be 0.3."""

_WORDS = re.compile(r"(?=[A-Za-z' ]*[A-Za-z]{3})(?!.*\b(?:and|or)\b)[A-Za-z]+(?: [A-Za-z']+)*")
_MATHEMATICAL = re.compile(
    r"inf(?:inity|ty)?|alpha|beta|gamma|delta|theta|lambda|sigma|omega|phi|psi|sin|cos|tan|log|exp|sqrt|none|empty(?: set)?|undefined"
    r"|all reals?(?: numbers)?|abcd?|xyz|pqr|rst|uvw",
    re.IGNORECASE,
)
"""Words that are mathematics too, or a product of letters: they are compared as such."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_LOOSE_JOINT = re.compile(r"[^A-Za-z]*|[^.!?\n]*?\b(?:and|or)\b[^.!?\n]*")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d+),(\d+)(?![\d.,])")
_UNCLOSED_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(?!.*\\(?:boxed|fbox))", re.DOTALL)


@dataclass(frozen=True)
class Gold:
    """One gold answer: its cleaned text, its number if it is one, what is wrong with it."""

    text: str
    number: Number | None = None
    is_words: bool = False
    """Words, not mathematics: compared as text."""
    problem: str | None = None


def read_golds(answer: Any, decimal_comma: bool = False) -> tuple[Gold, ...]:
    """The gold answers of a task, any of which is right; where one of them cannot be used, that one alone."""
    if type(answer) is str:
        return (_read(answer, decimal_comma),)
    if hasattr(answer, "tolist"):  # numpy, as a parquet file gives it
        answer = answer.tolist()
    if isinstance(answer, Mapping):
        return (_read_all(answer, decimal_comma),)
    if not isinstance(answer, (list, tuple)):
        return (_read_one(answer, decimal_comma),)
    golds = tuple(_read_one(item, decimal_comma) for item in answer)
    bad = next((gold for gold in golds if gold.problem), None)
    return (bad,) if bad else golds or (_bad("the list of answers is empty"),)


@functools.lru_cache(maxsize=8192)
def is_readable(gold: Gold) -> bool:
    """Whether the gold is a number, a formula or a text with a word in it; nothing is evaluated."""
    if gold.number is not None or gold.is_words or _WORD.search(gold.text):
        return True
    try:
        read(gold.text)
    except (Unreadable, RecursionError):
        return False
    return True


def _read_one(answer: Any, decimal_comma: bool) -> Gold:
    try:
        return _read(_text_of(answer), decimal_comma)
    except ValueError as error:
        return _bad(str(error))


def _text_of(answer: Any) -> str:
    """A gold that is a text or a number, as text; ValueError for anything else."""
    if isinstance(answer, str):
        return str(answer)
    if isinstance(answer, bool) or not isinstance(answer, numbers.Real):
        raise ValueError(f"the answer is {type(answer).__name__}, not a text or a number")
    if isinstance(answer, float):
        if not math.isfinite(answer):
            raise ValueError(f"the answer is {answer}")
        return repr(answer) if answer.is_integer() else f"{answer:.{FLOAT_DIGITS}g}"
    try:
        return str(answer)
    except ValueError:  # an integer of more digits than Python converts
        raise ValueError("the answer has too many digits") from None


def _read_all(answer: Mapping[str, Any], decimal_comma: bool) -> Gold:
    parts = answer.get("all")
    if set(answer) != {"all"} or not isinstance(parts, (list, tuple)) or not parts:
        return _bad('the answer is a mapping: write {"all": [one, another]} where every part is asked for')
    golds = [_read_one(part, decimal_comma) for part in parts]
    bad = next((gold for gold in golds if gold.problem), None)
    joined = ", ".join(gold.text for gold in golds)
    return bad or (golds[0] if len(golds) == 1 else Gold(joined))


def _bad(problem: str) -> Gold:
    return Gold("", problem=problem)


@functools.lru_cache(maxsize=8192)
def _read(raw: str, decimal_comma: bool) -> Gold:
    bare = _final(raw)
    text = clean(bare)
    if decimal_comma:
        text = _DECIMAL_COMMA.sub(r"\1.\2", text)
    if not text:
        return Gold(text, problem="the answer is empty")
    if not balanced(text):
        return Gold(text, problem=f"the braces of the answer {text[:200]!r} do not balance")
    return Gold(text, read_number(text), _is_words(text))


def _is_words(text: str) -> bool:
    if _MATHEMATICAL.fullmatch(text) is not None or is_product_of_letters(text, frozenset()):
        return False
    return text.lower() == "no" or (_WORDS.fullmatch(text) is not None and not _is_call(text))


def _is_call(text: str) -> bool:
    """Whether words are named functions with letters for arguments: `csc x`, `sin x cos y`, `cscx`."""
    words = text.split()
    if text in FUNCTIONS:
        return False
    return all(len(word) <= 2 or starts_with_function(word) for word in words) and any(len(word) > 2 for word in words)


def _final(raw: str) -> str:
    """The answer in a gold text. A gold is to be trusted: boxes next to each other are one answer, and a last box need not close."""
    if "####" in raw:
        return extraction.after_hashes(raw) or raw
    found = extraction.boxes(raw)
    if found:
        parts, next_start = [raw[found[-1][1] : found[-1][2]]], found[-1][0]
        for start, content, end in found[-2::-1]:
            gap = raw[end + 1 : next_start]
            if len(gap) > 40 or not _LOOSE_JOINT.fullmatch(gap) or "\n" in gap.strip():
                break
            parts.append(raw[content:end])
            next_start = start
        return ", ".join(reversed(parts))
    unclosed = _UNCLOSED_BOX.search(raw)
    if unclosed:
        return raw[unclosed.end() :]
    phrase = extraction.after_phrase(raw)
    return (
        phrase if phrase and balanced(phrase) else raw
    )  # a phrase inside `\\text{}` is a label: it takes no brace along
