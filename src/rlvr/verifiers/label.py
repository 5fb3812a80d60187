"""Verdicts of a judge: a label among a few (`[[A]]`, "A is better", yes / no), or a rating on a scale.

Invariant: the last line that names a label decides, and it names one label; so an answer is paid for one verdict.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, bare, check_not_negative, graded, unparsable, wrong
from rlvr.verifiers.text import read_one_number

# Matches `A or B`, `not A`, `isn't A`, `A?`; not `A wins`.
_DOUBT = re.compile(
    r"\b(?:not|no "
    r"longer|never|neither|nor|or|either|both|maybe|perhaps|possibly|unsure|uncertain|cannot|wrong|false|incorrect"
    r"|mistaken)\b|n't\b|n\u2019t\b|\?",
    re.IGNORECASE,
)
# `A` and `I` are labels only where no noun follows: `A is better`, not `A better answer`.
_NOT_ARTICLE = r"(?!\s+(?!(?:is|was|has|wins|won|performs|seems|beats|over|and|or|because|since)\b)[a-z])"
# Matches `7/10`, `7 out of 10 points`; not `7 of 10`, `out of order`.
_OUT_OF = re.compile(r"\s*(?:/|\bout of\b)\s*([0-9]+(?:\.[0-9]+)?)\s*(?:points?)?\s*\Z", re.IGNORECASE)

Labels = dict[str, tuple[str, ...]]
"""Label -> its spellings."""


@register_verifier("label")
@dataclass
class LabelVerifier(AnswerVerifier):
    """The last line of the answer that names a label names `task.answer`, and no other label.

    Labels match as whole words, whatever the case (one-letter labels: as capitals), the longest first. A line that also
    hedges or negates names none. With `verbatim` a label is named by the exact text of a spelling alone.
    """

    labels: tuple[Any, ...] | dict[str, Any] = ()
    """The labels: a list, or a mapping of each label to its spellings (`{A: [A is better, "[[A]]"]}`); empty: those of
    `info["labels"]`."""
    verbatim: bool = False
    """A label is named where one of its spellings stands in the completion, reasoning included, character for character
    and in any place, and no spelling of another label does. A label with spellings is not one of them itself. What says
    where an answer stands (`methods`, `fallback`, `think_opened_by_prompt`, `max_length`) is not used."""
    tail: int | None = None
    """With `verbatim`: the number of characters at the end of the completion that are read; null: all."""

    def __post_init__(self) -> None:
        if self.tail is not None and (self.tail < 1 or not self.verbatim):
            raise ConfigError(f"label: tail={self.tail} is a number of 1 or more, and needs `verbatim: true`")
        if self.labels:
            labels = self._read(self.labels)
            if isinstance(labels, str):
                raise ConfigError(f"label: {labels}")

    def check_task(self, task: Task) -> str | None:
        labels = self._labels(task)
        if isinstance(labels, str):
            return labels
        if not isinstance(task.answer, (str, int)) or _gold(task.answer, labels) is None:
            return f"the answer {_short(task.answer)} is none of the labels {', '.join(labels)}"
        return None

    def _find(self, task: Task, completion: str) -> str | Verdict:
        if not self.verbatim:
            return super()._find(task, completion)
        problem = self.check_task(task)
        if problem is not None:
            return Verdict.undecided(f"bad gold: {problem}")
        return completion if self.tail is None else completion[-self.tail :]

    def judge(self, task: Task, answer: str) -> Verdict:
        labels = self._labels(task)
        assert not isinstance(labels, str)
        label = verbatim_label(answer, labels) if self.verbatim else last_label(answer, labels)
        if label is None:
            where = "the text" if self.verbatim else "the last line that names one"
            return unparsable(f"no label, or several in {where}", answer[: self.max_length])
        if label == _gold(task.answer, labels):
            return Verdict.from_score(1.0, answer=label)
        return wrong("", label)

    def same_answer(self, first: str, second: str) -> bool:
        return bare(first).casefold() == bare(second).casefold()

    def _labels(self, task: Task) -> Labels | str:
        return self._read(self.labels or task.info.get("labels"))

    def _read(self, written: Any) -> Labels | str:
        labels = read_labels(written)
        if not self.verbatim or isinstance(labels, str):
            return labels
        exact = {label: words[1:] or words for label, words in labels.items()}
        # "supported" stands in every "not supported", whose label could then never be named.
        for label, words in exact.items():
            for other, others in exact.items():
                if label != other and any(word in longer for word in words for longer in others):
                    return f"with verbatim, a spelling of {label} is a part of one of {other}, which cannot be named"
        return exact


def _gold(answer: Any, labels: Labels) -> str | None:
    # str() of an integer of over 4,300 digits raises; 80 digits are more than any label has.
    if isinstance(answer, bool) or (isinstance(answer, int) and abs(answer) >= 10**80):
        return None
    text = str(answer).strip()
    return next((label for label in labels if label == text), None) or next(
        (label for label in labels if label.casefold() == text.casefold()), None
    )


def _short(value: Any) -> str:
    if not isinstance(value, int) or abs(value) < 10**80:
        return repr(value)[:80]
    return "a huge number"


def read_labels(labels: Any) -> Labels | str:
    """The labels with their spellings, at least two; else in words what is wrong with them."""
    if isinstance(labels, Mapping):
        spellings_of = {
            label: words if isinstance(words, (list, tuple)) else (words,) for label, words in labels.items()
        }
    elif isinstance(labels, Sequence) and not isinstance(labels, str):
        spellings_of = dict.fromkeys(labels, ())
    else:
        return 'there are no labels: set the verifier\'s `labels` or info["labels"], a list or a mapping to spellings'
    if any(isinstance(word, bool) for label, words in spellings_of.items() for word in (label, *words)):
        return "a label is true or false: put yes and no in quotes in YAML"
    table = {str(label): (str(label), *map(str, words)) for label, words in spellings_of.items()}
    spelled = [_key(spelling) for spellings in table.values() for spelling in dict.fromkeys(map(_key, spellings))]
    if len(table) < 2 or len(set(spelled)) < len(spelled) or "" in spelled:
        return f"the labels {', '.join(table)} are not at least two, each with spellings of its own"
    return table


def _key(spelling: str) -> str:
    text = bare(spelling)
    return text if len(text) == 1 else text.casefold()


def last_label(answer: str, labels: Labels) -> str | None:
    """The label that the last line with a label names; None where no line has one, or that line has two or a doubt."""
    pattern, meaning = _pattern(
        tuple(sorted((spelling, label) for label, spellings in labels.items() for spelling in spellings))
    )
    # From the end: a judge argues first and decides last.
    for line in reversed(answer.splitlines()):
        text = bare(line)
        named = {meaning[_key(match[0])] for match in pattern.finditer(text)}
        if named:
            clear = len(named) == 1 and not _DOUBT.search(pattern.sub(" ", text))
            return named.pop() if clear else None
    return None


def verbatim_label(text: str, labels: Labels) -> str | None:
    """The only label of which a spelling stands in the text; None where it is none, or more than one."""
    named = [label for label, spellings in labels.items() if any(spelling in text for spelling in spellings)]
    return named[0] if len(named) == 1 else None


@functools.lru_cache(maxsize=256)
def _pattern(spellings: tuple[tuple[str, str], ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern of all spellings, the longest first, and the label that each spelling means."""
    meaning = {_key(spelling): label for spelling, label in spellings}
    parts = []
    for text in sorted({bare(spelling) for spelling, _ in spellings}, key=len, reverse=True):
        before = r"(?<!\w)" if text[0].isalnum() else ""
        after = r"(?!\w)" if text[-1].isalnum() else ""
        letter = len(text) == 1 and text.isalpha()
        article = _NOT_ARTICLE if text in ("A", "I") else ""
        parts.append(
            f"{before}{re.escape(text)}{after}{article}" if letter else f"(?i:{before}{re.escape(text)}{after})"
        )
    return re.compile("|".join(parts)), meaning


@register_verifier("rating")
@dataclass
class RatingVerifier(AnswerVerifier):
    """The answer is one number on a scale, within `tolerance` of `task.answer`: `7`, `7/10`, `[[7]]`, `Rating: 7`.

    The last line that holds a digit counts. A number off the scale, or a second one, is no rating.
    """

    low: float = 1.0
    """The lowest rating."""
    high: float = 10.0
    """The highest rating."""
    tolerance: float = 0.0
    """Distance from the gold that is still correct."""
    partial_credit: bool = False
    """Outside of the tolerance: 1 - distance / (high - low) instead of 0."""

    def __post_init__(self) -> None:
        check_not_negative("rating", tolerance=self.tolerance)
        if not self.low < self.high:
            raise ConfigError(f"rating: low={self.low} is not below high={self.high}")
        if self.tolerance >= self.high - self.low:
            raise ConfigError(f"rating: within tolerance={self.tolerance} every rating would be correct")

    def check_task(self, task: Task) -> str | None:
        if not isinstance(task.answer, bool) and self._read(_short(task.answer).strip("'\"")) is not None:
            return None
        return f"the answer {_short(task.answer)} is no number from {self.low:g} to {self.high:g}"

    def judge(self, task: Task, answer: str) -> Verdict:
        gold = self._read(str(task.answer))
        rating = self._read(answer)
        assert gold is not None
        if rating is None:
            return unparsable(f"not one number from {self.low:g} to {self.high:g}", answer)
        distance = abs(rating - gold)
        # 1e-9 for the rounding of decimals: 8.3 - 8 is 0.3000000000000007.
        if distance <= self.tolerance + 1e-9:
            return Verdict.from_score(1.0, answer=answer)
        if self.partial_credit:
            return graded(1 - distance / (self.high - self.low), answer)
        return wrong("", answer)

    def same_answer(self, first: str, second: str) -> bool:
        one = self._read(first)
        other = self._read(second)
        if one is not None:
            return one == other
        return first.strip() == second.strip()

    def _read(self, text: str) -> float | None:
        lines = [line for line in map(bare, text.splitlines()) if any(c.isdigit() for c in line)]
        if not lines:
            return None
        line = re.sub(r"\[\[\s*([^\[\]]*)\]\]", r" \1 ", lines[-1]).strip(" .")
        out_of = _OUT_OF.search(line)
        if out_of:
            if float(out_of[1]) != self.high:
                return None
            line = line[: out_of.start()]
        number = read_one_number(line)
        if number and not number[1] and self.low <= number[0] <= self.high:
            return number[0]
        return None
