"""Tolerances of a comparison, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Percent = Literal["either", "number", "fraction"]
Units = Literal["checked", "ignored", "required"]


@dataclass(frozen=True)
class Rules:
    """The strictness of a comparison: see the options of MathVerifier."""

    ordered: bool = False
    """Compare a plain list of answers in order; tuples and vectors are always ordered, sets never."""
    require_simplified: bool = True
    r"""A plain number wants a plain number (`6 \cdot 7` is not 42), and an operator (an integral, a sum) must be worked
    out unless the gold has one too."""
    tolerance: float = 0.0
    """Relative rounding error allowed between numbers; 0 compares exactly."""
    variables: frozenset[str] = frozenset()
    """Letters that the problem uses as variables: they are no units."""
    nouns: frozenset[str] = frozenset()
    """Words of the problem, which may stand behind a number (`5 clowns`)."""
    percent: Percent = "either"
    units: Units = "checked"


@dataclass(frozen=True)
class MathComparison:
    """The outcome of one comparison."""

    equal: bool | None
    """None: it cannot be decided here."""
    reason: str = ""
    """The reason why the answer is not equal, if there is more to say than that its value is another."""
