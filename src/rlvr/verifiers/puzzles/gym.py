"""reasoning-gym's own scorers, in a worker process and under guard.

Some of its scorers pay for junk (0.01 for any text, or 1 for whatever is not `True`), and some evaluate the answer with
Python or SymPy. Invariants: only what scores above every nonsense text earns anything; the answer never reaches a
scorer that evaluates code unless it is made of harmless words.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, check_threshold, graded, require, unparsable, wrong
from rlvr.verifiers.base import Needs

# An empty text, words, two lines of words, empty JSON, and a number that is unlikely to be the answer of anything.
_NONSENSE = ("", "zqx", "zqx zqx\nzqx", "[]", "{}", "7919.5")
"""Texts that answer no question; what a scorer pays for them it pays for nothing."""
_EVALUATING = frozenset(
    """
    binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration
    spiral_matrix string_insertion
    """.split()  # noqa: SIM905
)
"""Data sets of reasoning-gym 0.1.25 whose scorers give the answer to `eval` or SymPy's `parse_expr`."""
_WORD = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi Abs".split()  # noqa: SIM905
)
_POWER = re.compile(r"\*\*|\^")

Scorer = Callable[[str | None, dict[str, Any]], float]


@register_verifier("reasoning_gym")
@dataclass
class ReasoningGymVerifier(AnswerVerifier):
    """The score that reasoning-gym's data set `info["dataset"]` gives the answer; `info["metadata"]` is the entry's
    metadata.

    A score that nonsense earns too is 0. Where the gold is a text it must earn 1, else the verdict is undecided; where
    nonsense earns 1 as well, the answer must equal the gold.
    """

    threshold: float | None = 1.0
    """From this score on an answer is correct, below it is wrong; null: the score itself."""
    time_limit: float = 10.0
    """Seconds for one answer; one that takes longer scores 0."""

    needs: ClassVar[Needs] = Needs(process=True)

    def __post_init__(self) -> None:
        check_threshold("reasoning_gym", self.threshold)
        require("reasoning_gym", "gym", "reasoning_gym")

    def prepare(self) -> None:
        importlib.import_module("reasoning_gym")

    def check_task(self, task: Task) -> str | None:
        if not isinstance(task.info.get("dataset"), str):
            return 'info["dataset"] does not name a data set of reasoning-gym'
        if not isinstance(task.info.get("metadata", {}), dict):
            return 'info["metadata"] is not a mapping'
        if task.answer is None or isinstance(task.answer, str):
            return None
        return "the answer is not a text"

    def judge(self, task: Task, answer: str) -> Verdict:
        name: str = task.info["dataset"]
        entry = {"question": task.prompt, "answer": task.answer, "metadata": dict(task.info.get("metadata", {}))}
        try:
            score = scorer(name)
            gold = 1.0
            if task.answer is not None:
                gold = _score(score, task.answer, entry)
        except Exception as error:  # an unknown data set, or metadata that its scorer cannot use
            return Verdict.undecided(f"bad gold: {name}: {type(error).__name__}: {error}")
        if gold < 1.0:
            return Verdict.undecided(f"bad gold: {name} scores its own answer {gold:g}")
        # The gold has just earned 1; some scorers would evaluate it again.
        if answer == task.answer:
            return Verdict.from_score(1.0, answer=answer)
        # Before the scorer sees it: `eval` of a model's text would run in the worker with the trainer's rights.
        if name in _EVALUATING and not harmless(answer):
            return unparsable("the scorer evaluates the answer, and this one is more than arithmetic", answer)
        # Asked for each task: what nonsense earns depends on the entry.
        floor = max(_score_or_zero(score, text, entry) for text in _NONSENSE)
        if floor >= 1.0:
            return wrong(f"{name} pays 1 for nonsense, so the answer is compared as text", answer)
        earned = _score_or_zero(score, answer, entry)
        if earned > floor:
            return graded(earned, answer, self.threshold)
        return wrong("", answer)


def harmless(text: str) -> bool:
    """Return True if the evaluation of `text` can only do arithmetic: no string, no attribute, no name but letters and
    functions, one power at a time."""
    words = _WORD.findall(text)
    # Single letters are variables of a polynomial; every other word would be a name of Python.
    plain = all(len(word) == 1 or word in _FUNCTIONS for word in words)
    attribute = re.search(r"\.\s*[^\W\d]", text)
    # 15 digits and 8 powers, one at a time: `9**9**9` has two powers, whose value has 370 million digits, so a worker's
    # time limit and memory stand behind this.
    digits = max((len(run) for run in re.findall(r"[0-9]+", text)), default=0)
    quoted = any(mark in text for mark in "'\"\\`@:;=!")
    return (
        plain and not attribute and not quoted and digits <= 15 and len(_POWER.findall(text)) <= 8 and "__" not in text
    )


@functools.lru_cache(maxsize=128)
def scorer(name: str) -> Scorer:
    """The scorer of a data set, with what it prints thrown away."""
    score: Scorer = importlib.import_module("reasoning_gym").get_score_answer_fn(name)
    return score


def _score(score: Scorer, answer: str | None, entry: dict[str, Any]) -> float:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        value = float(score(answer, entry))
    if not math.isfinite(value):
        raise ValueError(f"the scorer returned {value}")
    return value


def _score_or_zero(score: Scorer, answer: str, entry: dict[str, Any]) -> float:
    try:
        return _score(score, answer, entry)
    except MemoryError:  # the pool finds out whether it is the text's doing
        raise
    except Exception:  # whatever the text makes the scorer raise is the text's doing
        return 0.0
