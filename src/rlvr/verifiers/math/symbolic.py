"""Equality of symbolic answers, by math-verify (SymPy): slow, unbounded in time, so for worker processes.

Only its LaTeX reader is used: its reader of bare expressions goes through SymPy's `parse_expr`, which runs code. Its own
timeouts are off, since they need SIGALRM on the main thread: whoever calls this holds the clock.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

_EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")
_CONSTANTS = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|ln|log|exp|sin|cos|tan|circ|text)(?![A-Za-z])|\b[ei]\b")


def load() -> None:
    """Pay for the imports now (about a second)."""
    _math_verify()


@functools.lru_cache(maxsize=256)
def parse(latex: str) -> tuple[Any, ...]:
    """The SymPy objects that `latex` writes, and its normalised text; empty when nothing can be read."""
    library, config = _math_verify()
    return tuple(library.parse(f"\\boxed{{{latex}}}", extraction_config=[config], parsing_timeout=None))


def readable(latex: str) -> bool:
    """Whether `latex` is a mathematical object, not only a text."""
    return any(not isinstance(found, str) for found in parse(latex))


def equal(gold: str, answer: str) -> bool:
    r"""Whether two LaTeX answers mean the same. Not symmetric: the gold decides what form is asked for.

    Where the gold states no equation, a chain of equalities is right only when every side is, except a first side that
    names what was asked for (`\sin\theta = ...`): `1 = \sqrt{2}` is two answers.
    """
    if not _EQUALS.search(gold):
        first, *rest = _EQUALS.split(answer)
        sides = rest if rest and _names_something(first) else [first, *rest]
        return all(_same(gold, side.strip()) for side in sides)
    return _same(gold, answer)


def _names_something(side: str) -> bool:
    return re.search(r"[A-Za-z]", _CONSTANTS.sub(" ", side)) is not None


def _same(gold: str, answer: str) -> bool:
    library, _ = _math_verify()
    return library.verify(list(parse(gold)), list(parse(answer)), timeout_seconds=None)


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its timeouts are off
    import math_verify

    return math_verify, math_verify.LatexExtractionConfig(boxed_match_priority=0)
