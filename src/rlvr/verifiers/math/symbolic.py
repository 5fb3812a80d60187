r"""Equality of symbolic answers, by math-verify (SymPy), for what the comparison here leaves undecided. It is asked for
by the option `math_verify`, and the package is an extra of its own.

Only its LaTeX reader is used: its reader of bare expressions goes through SymPy's `parse_expr`, which runs code. Its
own timeouts are off, since they need SIGALRM on the main thread: `deadline` holds the clock, and what could spend its
time in one long operation (powers of powers, large factorials) or is known to be compared too kindly (ellipses, texts)
is not given to it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from typing import Any

from rlvr.verifiers.math.computation_deadline import within

MAX_LENGTH = 400
"""Characters of a text that is given to math-verify."""

# Matches `x = 2`; not `x <= 2`, `x := 2`.
_EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")
# Matches `\frac{1}{2}`, `e`; not `x`.
_CONSTANTS = re.compile(r"\\(?:frac|sqrt|pi|cdot|times|ln|log|exp|sin|cos|tan|circ|text)(?![A-Za-z])|\b[ei]\b")
# Matches `2^{10000}`, `2^{2^3}`, `10000!`; not `2^{10}`, `5!`. What SymPy would work out in one operation in C, which
# no deadline can interrupt.
_COSTLY = re.compile(
    r"\d{25}|\d\.?\d*[eE][+-]?\d{3}|\^\s*\{?\s*[-(]*\s*\d{4}|\^[^{}]*\^|\^\s*\{[^}]*(?:\^|!)|\d{4,}\s*!|!\s*!"
    r"|\)\s*!\s*\)?\s*[\^!]"
    r"|\^\s*\{[^}]*\{"
)
# Matches `1, 2, \ldots`, `\text{yes}`; not `x`.
_VAGUE = re.compile(r"\.\.\.|\\[lcvd]?dots|\\ldots|\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*[A-Za-z]{2}")


def is_installed() -> bool:
    """Return True if the package math-verify can be imported."""
    return importlib.util.find_spec("math_verify") is not None


@functools.cache
def load() -> None:
    """Pay for the imports now (about a second), those that a first comparison makes too."""
    _equal("x+1", "1+x+x^2-x^2")


def fit(latex: str) -> bool:
    """Return True if math-verify may be asked about `latex` at all."""
    return len(latex) <= MAX_LENGTH and not _COSTLY.search(latex) and not _VAGUE.search(latex)


def equal(gold: str, answer: str, seconds: float) -> bool:
    r"""Return True if two LaTeX answers mean the same. Not symmetric: the gold decides what form is asked for.

    Where the gold states no equation, a chain of equalities is right only when every side is, except a first side that
    names what was asked for (`\sin\theta = ...`): `1 = \sqrt{2}` is two answers. Raises deadline.OutOfTime.
    """
    load()
    return within(seconds, lambda: _equal(gold, answer))


def _equal(gold: str, answer: str) -> bool:
    if not _EQUALS.search(gold):
        first, *rest = _EQUALS.split(answer)
        if rest and re.search(r"[A-Za-z]", _CONSTANTS.sub(" ", first)):  # it names what was asked for
            sides = rest
        else:
            sides = [first, *rest]
        return all(_same(gold, side.strip()) for side in sides)
    return _same(gold, answer)


def _same(gold: str, answer: str) -> bool:
    library, _ = _math_verify()
    read = list(_parse(answer))
    # An answer that is a text only is no mathematical object.
    return any(not isinstance(item, str) for item in read) and library.verify(
        list(_parse(gold)), read, timeout_seconds=None
    )


@functools.lru_cache(maxsize=256)
def _parse(latex: str) -> tuple[Any, ...]:
    """The SymPy objects that `latex` writes, and its normalised text; empty when nothing can be read."""
    library, config = _math_verify()
    return tuple(library.parse(f"\\boxed{{{latex}}}", extraction_config=[config], parsing_timeout=None))


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    # It warns that its timeouts are off, and logs every text that it cannot read with a traceback: both are verdicts
    # here.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    import math_verify

    return math_verify, math_verify.LatexExtractionConfig(boxed_match_priority=0)
