"""The findings of a comparison of two runs, the definition of a difference, and the first step in which their metrics
differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.monitor.metrics import metric_of


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


SHOWN = 8
"""Metrics of the first step that are named."""


def compare_metrics(a: Path, b: Path, tolerance: float, notes: list[str]) -> Parting:
    """The steps that both runs have, in order, up to the first that differs."""
    parting = Parting("metrics")
    only = [set[str](), set[str]()]
    rows_of_b = {row["step"]: row for row in read_rows(b / "metrics.jsonl", notes)}
    for one in read_rows(a / "metrics.jsonl", notes):
        if (other := rows_of_b.get(one["step"])) is None:
            continue
        parting.compared += 1
        # A metric that a version lacks, or that another component adds, is no difference of the numbers.
        only[0] |= one.keys() - other.keys()
        only[1] |= other.keys() - one.keys()
        names = [name for name in one if name in other and _is_different(name, one[name], other[name], tolerance)]
        if names:
            parting.step = one["step"]
            parting.lines = [f"{name}: {one[name]!r} and {other[name]!r}" for name in names[:SHOWN]]
            if len(names) > SHOWN:
                parting.lines.append(f"and {len(names) - SHOWN} more metrics")
            break
    for run, names_of_one in zip((a, b), only, strict=True):
        if names_of_one:
            few = ", ".join(sorted(names_of_one)[:3])
            notes.append(f"{len(names_of_one)} metrics are in {run} only ({few} ...) and are not compared")
    return parting


def _is_different(name: str, one: Any, other: Any, tolerance: float) -> bool:
    metric = metric_of(name)
    if metric is not None and metric.of_the_clock:
        return False
    numbers = all(isinstance(value, (int, float)) for value in (one, other))
    if numbers:
        return differ(one, other, tolerance)
    return one != other
