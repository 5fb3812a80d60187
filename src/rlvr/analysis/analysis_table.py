"""A table of an analysis and the results of `python -m rlvr.evaluate` that it is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.errors import DataError
from rlvr.evaluation import TaskResult, interval, read_result, values_of
from rlvr.evaluation.evaluation_loop import parts
from rlvr.monitor.console_text import number

ALL = "all"
"""The name of the row about all tasks."""


@dataclass
class AnalysisTable:
    """Columns, rows of as many cells, and sentences about what the rows leave out or assume."""

    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    """Texts, numbers, intervals as (low, high), and None for what is not defined."""
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """The table as Markdown, floats to three significant digits, and the notes below it."""
        lines = [_line(self.columns), _line("---" for _ in self.columns)]
        lines += [_line(map(_cell, row)) for row in self.rows]
        lines += [text for note in self.notes for text in ("", note)]
        return "\n".join(lines)

    def json(self) -> str:
        """`{"rows": [{column: value}], "notes": [...]}` with all digits."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return json.dumps({"rows": rows, "notes": self.notes}, indent=1, allow_nan=False)


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        low, high = value
        return f"{number(low)} to {number(high)}"
    return number(value)


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: the result of each task by its id, and how the responses were sampled."""

    path: Path
    by_id: dict[str, TaskResult]
    settings: dict[str, Any]
    """The values in the file beside the tasks: `model`, `k`, `sampling`, `scorer` ...; `step` in a run's own files."""

    def on(self, ids: Sequence[str]) -> list[TaskResult]:
        """The results of these tasks, in this order."""
        return [self.by_id[name] for name in ids]


def read_evaluated(path: str | Path) -> Evaluated:
    """The evaluation in a file of `rlvr.evaluate` or of a run's folder `evaluations`. DataError where it is none."""
    task_results = read_result(Path(path))
    written = json.loads(Path(path).read_text(encoding="utf-8"))
    settings = {name: value for name, value in written.items() if name != "by_task"}
    return Evaluated(Path(path), {task_result.id: task_result for task_result in task_results}, settings)


def common_ids(evaluated: Sequence[Evaluated], notes: list[str]) -> list[str]:
    """The ids of the tasks that all evaluations have, in the order of the first; a note about the others.

    DataError where they have none in common.
    """
    ids = [name for name in evaluated[0].by_id if all(name in one.by_id for one in evaluated)]
    if not ids:
        files = ", ".join(str(one.path) for one in evaluated)
        raise DataError(f"the evaluations have no task in common, by id: {files}")
    left_out = len({name for one in evaluated for name in one.by_id}) - len(ids)
    if left_out:
        notes.append(f"{left_out} tasks that not every evaluation has are left out.")
    return ids


def parts_of(evaluated: Evaluated, ids: Sequence[str]) -> dict[str, list[str]]:
    """Name -> ids: all tasks, and where there are several sources or levels of difficulty each of them."""
    named = {name: [t.id for t in members] for name, members in parts(evaluated.on(ids)).items()}
    return {ALL: list(ids)} | named


def paired_change(before: np.ndarray, after: np.ndarray) -> tuple[float | None, tuple[float, float] | None]:
    """The mean of `after - before` over tasks [T], NaN left out, and its 95 % bootstrap interval over tasks."""
    change = (after - before)[~np.isnan(after - before)]
    if not len(change):
        return None, None
    return float(change.mean()), interval(change)


NEEDED = {
    "greedy": "without --no-greedy",
    "mean": "with --samples 1 or more",
    "pass@": "with --k {}",
    "maj@": "with --k {} and a verifier that names answers (math, choice ...)",
    "best@": "with --k {} and a --scorer",
}
"""Metric, or its beginning -> what an evaluation needs to have it."""


def metric_values(evaluated: Evaluated, ids: Sequence[str], metric: str) -> np.ndarray:
    """The metric (`greedy`, `mean`, `pass@k`, `maj@k`, `best@k`) of each task, float64 [T], NaN where it has none.

    DataError where no task has it.
    """
    k = metric.partition("@")[2]
    by_name = values_of(evaluated.on(ids), [int(k)] if k.isdecimal() else [])
    if metric not in by_name or np.isnan(by_name[metric]).all():
        if metric not in NEEDED and metric.partition("@")[0] + "@" not in NEEDED:
            raise DataError(f"there is no metric {metric!r}; known: greedy, mean, pass@k, maj@k, best@k")
        needed = NEEDED[metric] if metric in NEEDED else NEEDED[metric.partition("@")[0] + "@"].format(k)
        raise DataError(f"{evaluated.path} has no {metric}: choose another --metric, or evaluate {needed}")
    return by_name[metric]
