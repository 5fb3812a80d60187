"""The first step whose metrics differ. Metrics of the clock (`Metric.of_the_clock`) are left out.

Invariant: one line of each file is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr.diff.parting import Parting, differ, read_rows
from rlvr.monitor.metrics import metric_of

SHOWN = 8
"""Metrics of the first step that are named."""


def compare_metrics(a: Path, b: Path, tolerance: float, notes: list[str]) -> Parting:
    """The steps that both runs have, in order, up to the first that differs."""
    parting = Parting("metrics")
    only = [set[str](), set[str]()]
    for one, other in _pairs(read_rows(a / "metrics.jsonl", notes), read_rows(b / "metrics.jsonl", notes)):
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


def _pairs(a: Iterator[dict[str, Any]], b: Iterator[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of the same step, in order of steps."""
    one = next(a, None)
    other = next(b, None)
    while one is not None and other is not None:
        # A merge of two sorted files: the row with the smaller step is skipped.
        if one["step"] == other["step"]:
            yield one, other
            one = next(a, None)
            other = next(b, None)
        elif one["step"] < other["step"]:
            one = next(a, None)
        else:
            other = next(b, None)
