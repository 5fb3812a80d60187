"""Common parts of the comparisons of two runs: their findings, and the definition of a difference."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Parting:
    """The result of one comparison."""

    what: str
    """The name of the compared files: metrics, rollouts, checkpoints."""
    compared: int = 0
    """Steps that both runs have."""
    step: int | None = None
    """The first step in which they differ; None where they do not."""
    lines: list[str] = field(default_factory=list)
    """Descriptions of the difference."""


def differ(a: float, b: float, tolerance: float) -> bool:
    """Return True if two numbers are further apart than `tolerance` times the larger of them and 1; NaN is equal to
    NaN."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) != math.isnan(b)
    # inf - inf is NaN, so infinities are compared before the subtraction.
    if a == b or math.isinf(a) or math.isinf(b):
        return a != b
    # Relative for numbers above 1, absolute below, so that a loss of 1e-9 and one of 2e-9 are equal within 1e-6.
    return abs(a - b) > tolerance * max(1.0, abs(a), abs(b))


def read_rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines that have a step; reading ends at a line that is none, and a note says so."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                row["step"] = int(row["step"])
            except (ValueError, TypeError, KeyError, RecursionError):
                what = "is cut" if not line.endswith("\n") else "is no record"
                notes.append(f"{path}, line {number} {what}; the file is used up to there")
                return
            yield row
