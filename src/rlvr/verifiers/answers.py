"""What the rule-based verifiers share: from a completion to one bare answer, and the verdicts that follow from it; and the simplest
of them, `exact`.

Invariants: a gold that cannot be used is undecided, whatever the completion says; a completion without an answer, or with
one that is too long, scores 0 before anything that takes more than linear time sees it.
"""

from __future__ import annotations

import importlib.util
import math
import re
import unicodedata
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.extraction import METHODS, Fallback, Method, extract_answer


def read_texts(answer: Any) -> tuple[str, ...] | str:
    """The texts that are right, at least one, none empty; else in words why the gold cannot be used."""
    texts = answer if isinstance(answer, (list, tuple)) else [answer]
    if not texts:
        return "the list of answers is empty"
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            return "the task has no answer" if text is None else f"the answer {text!r} is not a text or a number"
        if isinstance(text, int) and abs(text) >= 10**1000:
            return "the answer has too many digits"
        if not str(text).strip():
            return "the answer is empty"
    return tuple(str(text) for text in texts)


_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathsf|mathit|mbox|emph|operatorname)\s*\{([^{}]*)\}"
)
_NEGATES = re.compile(r"\\n(?:eq|e|eg|ot)(?![A-Za-z])|\\lnot(?![A-Za-z])|[\u2260\u00ac\u0338]|!=|\A[\s$({\[]*[~!]")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+")
_DELIMITER = re.compile(r"\\[()\[\]]|\\(?:left|right)\b|\\[ ,;:!]|\*\*|__|[$`~]")


@dataclass
class AnswerVerifier(Verifier):
    """Base of verifiers that extract one answer and judge it by a rule; subclasses write `judge` and `check_task`."""

    methods: tuple[Method, ...] = METHODS
    """Where to look for the answer, in order of precedence: `boxed`, `hash` (`#### 72`), `tag` (`<answer>`), `phrase`."""
    fallback: Fallback = "whole"
    """When none of the methods finds anything: `none`, the `last_formula`, the `last_number`, or the `whole` text after the
    reasoning."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no answer yet."""
    max_length: int = 2000
    """Characters of an answer; a longer one is unparsable."""

    @abstractmethod
    def judge(self, task: Task, answer: str) -> Verdict:
        """The verdict on an extracted answer to a task that `check_task` has passed."""

    def quick(self, task: Task, completion: str) -> Verdict | None:
        found = self._find(task, completion)
        if isinstance(found, Verdict):
            return found
        return None if self.needs.process else self.judge(task, found)

    def verify(self, task: Task, completion: str) -> Verdict:
        found = self._find(task, completion)
        return found if isinstance(found, Verdict) else self.judge(task, found)

    def _find(self, task: Task, completion: str) -> str | Verdict:
        """The extracted answer, or the verdict where there is nothing to judge."""
        problem = self.check_task(task)
        if problem is not None:
            return Verdict.undecided(f"bad gold: {problem}")
        answer = extract_answer(completion, self.methods, self.fallback, self.think_opened_by_prompt)
        if answer is None:
            return unparsable("no final answer found")
        if len(answer) > self.max_length:
            reason = f"the answer has {len(answer)} characters, over the limit of {self.max_length}"
            return unparsable(reason, answer[: self.max_length])
        if _NEGATES.search(answer) and not _NEGATES.search(str(task.answer)):
            return wrong("the answer says what it is not", answer)
        return answer


def unparsable(reason: str, answer: str | None = None) -> Verdict:
    """Score 0 for what cannot be read as an answer."""
    return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason=reason, answer=answer)


def wrong(reason: str, answer: str) -> Verdict:
    """Score 0 for an answer that was read and is not right."""
    return Verdict(VerdictStatus.WRONG, 0.0, reason=reason, answer=answer)


def graded(score: float, answer: str, threshold: float | None = None, **scores: float) -> Verdict:
    """The verdict of a score in [0, 1]: itself, or with a `threshold` 1 from there on and else 0.

    The score before the threshold stays readable in `Verdict.scores`, next to the further named `scores`.
    """
    score = min(max(score, 0.0), 1.0)
    scores = {"score": score, **scores}
    decided = score if threshold is None else float(score >= threshold)
    return Verdict.from_score(decided, answer=answer, scores=scores)


def check_threshold(name: str, threshold: float | None) -> None:
    """ConfigError for a threshold that every answer or no answer reaches."""
    if threshold is not None and not 0.0 < threshold <= 1.0:
        raise ConfigError(f"{name}: threshold={threshold} is not in (0, 1]")


def check_not_negative(name: str, **options: float) -> None:
    """ConfigError for an option that is negative or not finite."""
    for option, value in options.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}: {option}={value} is not a number of 0 or more")


def require(module: str, extra: str, name: str) -> None:
    """ConfigError where the library behind the verifier `name` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{name} needs the library {module}: pip install 'rlvr[{extra}]'")


def bare(text: str) -> str:
    r"""`text` without what only dresses it: LaTeX text commands and delimiters, Markdown marks, wide and circled letters.

    Whitespace is collapsed. Up to three nested LaTeX commands are unwrapped. Raised digits stay raised: 4 to the 2 is not 42.
    """
    text = _RAISED.sub(lambda run: f"^{{{run[0]}}}", text)
    text = unicodedata.normalize("NFKC", text)
    for _ in range(3):
        text, found = _WRAPPER.subn(r"\1", text)
        if not found:
            break
    return " ".join(_DELIMITER.sub(" ", text).split())


@register_verifier("exact")
@dataclass
class ExactVerifier(AnswerVerifier):
    """The answer equals `task.answer`, or one of them where it is a list. By default it is all of the text after the
    reasoning block, and only the space around it does not matter.
    """

    methods: tuple[Method, ...] = ()
    """Where to look for the answer before the fallback: `boxed`, `hash` (`#### 72`), `tag` (`<answer>`), `phrase`."""
    fallback: Fallback = "whole"
    """When none of the methods finds anything: `none`, the `last_formula`, the `last_number`, or the `whole` text after the
    reasoning."""
    max_length: int = 100_000
    """Characters of an answer; a longer one is unparsable."""
    casefold: bool = False
    """Ignore case."""
    ignore_space: bool = False
    """Any run of white space is one space."""
    ignore_punctuation: bool = False
    """Leave out punctuation (Unicode categories P)."""
    unicode: bool = False
    """Compare after NFKC normalisation: full-width letters, ligatures and composed accents do not matter."""

    def check_task(self, task: Task) -> str | None:
        golds = read_texts(task.answer)
        if isinstance(golds, str):
            return golds
        emptied = [gold for gold in golds if not self._key(gold)]
        return f"nothing is left of the answer {emptied[0]!r} after normalisation" if emptied else None

    def judge(self, task: Task, answer: str) -> Verdict:
        return Verdict.from_score(
            any(self.same_answer(answer, gold) for gold in read_texts(task.answer)), answer=answer
        )

    def same_answer(self, first: str, second: str) -> bool:
        return self._key(first) == self._key(second)

    def _key(self, text: str) -> str:
        """What two equal answers share."""
        if self.unicode:
            text = unicodedata.normalize("NFKC", text)
        if self.casefold:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split()) if self.ignore_space else text.strip()
