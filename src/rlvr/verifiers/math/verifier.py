"""The mathematics verifier: one extracted answer against one gold answer.

The stages, each only where the one before cannot decide:
1. extraction.extract_answer: which text is the answer (microseconds);
2. numeric.read_number: plain numbers, exactly (microseconds);
3. symbolic.equal: math-verify on LaTeX (milliseconds to seconds, in a worker process).

Invariants: stages 1 and 2 are `quick`, take linear time and evaluate nothing; whatever the answer causes scores 0;
only a bad gold is undecided.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers import extraction
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.extraction import METHODS, Fallback, Method
from rlvr.verifiers.math import symbolic
from rlvr.verifiers.math.latex import balanced, clean, spelling
from rlvr.verifiers.math.numeric import Number, read_number

_WORDS = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]+)*")
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|either|alternatively)\b", re.IGNORECASE)


@register_verifier("math")
@dataclass
class MathVerifier(Verifier):
    r"""Checks the final answer of a completion against `task.answer`.

    The gold is a number or a text: a bare answer in LaTeX, or a solution that ends in `#### 72` or `\boxed{72}`.
    """

    methods: tuple[Method, ...] = METHODS
    """Where to look for the answer, in order of precedence: `boxed`, `hash` (`#### 72`), `tag` (`<answer>`), `phrase`."""
    fallback: Fallback = "none"
    """When none of the methods finds anything: `none`, the `last_number`, or the `whole` text after the reasoning."""
    require_simplified: bool = True
    r"""A gold that is a plain number wants a plain number: `6 \cdot 7` for 42 restates the problem and is wrong."""
    tolerance: float = 0.0
    """Relative error allowed between plain numbers; 0 compares exactly."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no answer yet."""
    max_length: int = 2000
    """Characters of an answer; a longer one is unparsable."""
    time_limit: float = 10.0
    """Seconds for the symbolic stage; an answer that takes longer scores 0."""

    needs: ClassVar[Needs] = Needs(process=True)

    def prepare(self) -> None:
        symbolic.load()

    def quick(self, task: Task, completion: str) -> Verdict | None:
        """The verdict where no symbolic mathematics is needed, else None."""
        gold = read_gold(task.answer)
        if gold.problem:
            return Verdict.undecided(f"bad gold: {gold.problem}")
        found = extraction.extract_answer(completion, self.methods, self.fallback, self.think_opened_by_prompt)
        if found is None:
            return _zero(VerdictStatus.UNPARSABLE, "no final answer found", None)
        if len(found) > self.max_length:
            reason = f"the answer has {len(found)} characters, over the limit of {self.max_length}"
            return _zero(VerdictStatus.UNPARSABLE, reason, found[: self.max_length])
        return self._compare(gold, found)

    def verify(self, task: Task, completion: str) -> Verdict:
        """The verdict, through all stages. It may take long on a hostile answer: the pool runs it under a time limit."""
        verdict = self.quick(task, completion)
        if verdict is not None:
            return verdict
        found = extraction.extract_answer(completion, self.methods, self.fallback, self.think_opened_by_prompt) or ""
        gold, answer = read_gold(task.answer), clean(found)
        if not gold.number and not symbolic.parse(gold.text):
            return Verdict.undecided(f"bad gold: {gold.text!r} cannot be read as mathematics")
        try:
            readable, equal = symbolic.readable(answer), symbolic.equal(gold.text, answer)
        except Exception as error:  # the gold was read: what goes wrong now is the answer's doing
            return _zero(VerdictStatus.UNPARSABLE, f"{type(error).__name__} while reading the answer", found)
        if equal:
            return _correct(found)
        return (
            _zero(VerdictStatus.WRONG, "", found) if readable else _zero(VerdictStatus.UNPARSABLE, "no formula", found)
        )

    def check_task(self, task: Task) -> str | None:
        gold = read_gold(task.answer)
        if gold.problem or gold.number or gold.is_words:
            return gold.problem
        if not symbolic.readable(gold.text):
            return f"the answer {gold.text!r} cannot be read as mathematics"
        return None

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two answers are the same number or the same text; nothing is evaluated, so votes cost microseconds."""
        one, other = clean(first), clean(second)
        a, b = read_number(one), read_number(other)
        return a.equals(b, self.tolerance) if a and b else spelling(one) == spelling(other)

    def _compare(self, gold: Gold, found: str) -> Verdict | None:
        answer = clean(found)
        if not answer or not balanced(answer):
            return _zero(VerdictStatus.UNPARSABLE, "the answer is empty or its braces do not balance", found)
        number = read_number(answer)
        if gold.number is not None and number is not None:
            if not gold.number.equals(number, self.tolerance):
                return _zero(VerdictStatus.WRONG, "", found)
            restated = number.is_fraction and not gold.number.is_fraction and gold.number.value.denominator == 1
            if restated and self.require_simplified:
                return _zero(VerdictStatus.WRONG, "equal, but a fraction where the gold is an integer", found)
            return _correct(found)
        if spelling(answer) == spelling(gold.text):
            return _correct(found)
        if gold.number is not None and self.require_simplified:
            return _zero(VerdictStatus.WRONG, "not a plain number, and the gold is one", found)
        if gold.is_words:
            same = spelling(answer).casefold() == spelling(gold.text).casefold()
            return _correct(found) if same else _zero(VerdictStatus.WRONG, "", found)
        if _HEDGE.search(found) and not _HEDGE.search(gold.raw):
            return _zero(VerdictStatus.WRONG, "several alternatives where the gold has one answer", found)
        return None


def _correct(answer: str) -> Verdict:
    return Verdict(VerdictStatus.CORRECT, 1.0, answer=answer)


def _zero(status: VerdictStatus, reason: str, answer: str | None) -> Verdict:
    return Verdict(status, 0.0, reason=reason, answer=answer)


@dataclass(frozen=True)
class Gold:
    """A gold answer, read once: its text as given and cleaned, its number if it is one, what is wrong with it."""

    raw: str
    text: str
    number: Number | None = None
    is_words: bool = False
    """Words, not mathematics: compared as text."""
    problem: str | None = None


def read_gold(answer: Any) -> Gold:
    """The gold answer of a task; never raises, `problem` says what cannot be used."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return Gold("", "", problem=f"the answer is {type(answer).__name__}, not a text or a number")
    try:
        return _read_gold(str(answer))
    except ValueError:  # an integer of more digits than Python converts
        return Gold("", "", problem="the answer has too many digits")


@functools.lru_cache(maxsize=4096)
def _read_gold(raw: str) -> Gold:
    bare = (extraction.after_hashes(raw) if "####" in raw else extraction.last_boxed(raw)) or raw
    text = clean(bare)
    if not text:
        return Gold(raw, text, problem="the answer is empty")
    if not balanced(text):
        return Gold(raw, text, problem=f"the braces of the answer {text!r} do not balance")
    return Gold(bare, text, read_number(text), _WORDS.fullmatch(text) is not None)
