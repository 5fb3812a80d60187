"""Equality of symbolic answers, by math-verify (SymPy): slow, unbounded in time, so for worker processes.

Only its LaTeX reader is used: its reader of bare expressions goes through SymPy's `parse_expr`, which runs code. Its own
timeouts are off, since they need SIGALRM on the main thread: whoever calls this holds the clock.
"""

from __future__ import annotations

import functools
import logging
from typing import Any


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
    """Whether two LaTeX answers mean the same. Not symmetric: the gold decides what form is asked for."""
    library, _ = _math_verify()
    return library.verify(list(parse(gold)), list(parse(answer)), timeout_seconds=None)


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its timeouts are off
    import math_verify

    return math_verify, math_verify.LatexExtractionConfig(boxed_match_priority=0)
