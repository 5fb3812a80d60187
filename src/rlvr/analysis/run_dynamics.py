"""Training runs side by side: policy entropy at both ends, tokens clipped, the largest gradient, held-out results.

Chen et al. 2025, "Exploration vs Exploitation", arXiv 2512.16912, compare random rewards with and without clipping by
the policy's entropy, its stability and its held-out accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.analysis.analysis_table import AnalysisTable, common_ids, metric_values, paired_change, read_evaluated
from rlvr.errors import DataError
from rlvr.evaluation.task_result import mean
from rlvr.report.folder import read_run

COLUMNS = ["run", "steps", "entropy first", "entropy last", "entropy change", "clipped low", "clipped high"]
COLUMNS += ["reward last", "length last", "grad norm largest"]
# A choice: entropy differs from step to step by the tasks that are drawn, and ten steps are few of a run's hundreds.
WINDOW = 10
"""Steps at each end of a run whose mean is taken."""


def runs_table(folders: Sequence[str | Path], metric: str = "mean", window: int = WINDOW) -> AnalysisTable:
    """A row for each run, and one of means (`NAME: n seeds`) below those of a sweep over seeds (`run.seeds`).

    Steps of reinforcement count, those of supervised stages do not. `metric` of the first and of the last evaluation,
    on the tasks that both have. DataError for a folder that is no run, or has no step of reinforcement.
    """
    named = [metric + end for end in (" at start", " at end", " change", " change 95 %")]
    table = AnalysisTable([*COLUMNS, *named])
    for folder in map(Path, folders):
        seeds = sorted(folder.glob("seed-*")) if (folder / "seeds.json").is_file() else []
        rows = [_row(run, metric, window, table.notes) for run in seeds or [folder]]
        table.rows += rows
        if len(rows) > 1:
            table.rows.append([f"{folder.name}: {len(rows)} seeds", *(_mean(cells) for cells in _numbers(rows))])
    table.notes = list(dict.fromkeys(table.notes))
    return table


def _row(folder: Path, metric: str, window: int, notes: list[str]) -> list[Any]:
    run = read_run(folder)
    rows = [row for row in run.rows if row.get("reward/mean") is not None]
    if not rows:
        raise DataError(f"{folder} has no step of reinforcement")
    first = _of(rows[:window], "entropy")
    last = _of(rows[-window:], "entropy")
    change = None if first is None or last is None else last - first
    cells: list[Any] = [_name(folder), len(rows), first, last, change]
    cells += [_of(rows, name) for name in ("ratio/clipped_low", "ratio/clipped_high")]
    cells += [_of(rows[-window:], name) for name in ("reward/mean", "completion/length_mean")]
    norms = [row["grad_norm"] for row in rows if row.get("grad_norm") is not None]
    return [*cells, max(norms, default=None), *_held_out(folder, metric, notes)]


def _name(folder: Path) -> str:
    """The run's name; of a seed with the name of its sweep."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if (path.parent / "seeds.json").is_file() else path.name


def _held_out(folder: Path, metric: str, notes: list[str]) -> list[Any]:
    """The metric in the first and in the last evaluation, the change, its interval over tasks; None without two."""
    files = sorted((folder / "evaluations").glob("step-*.json"))
    if len(files) < 2:
        notes.append("A run without two evaluations has no held-out results.")
        return [None] * 4
    ends = [read_evaluated(file) for file in (files[0], files[-1])]
    ids = common_ids(ends, notes)
    before, after = (metric_values(one, ids, metric) for one in ends)
    return [mean(before), mean(after), *paired_change(before, after)]


def _of(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """The mean of a metric over steps; None where none has it."""
    present = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(present)) if present else None


def _numbers(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """The cells of each column but the first."""
    return [list(cells) for cells in zip(*(row[1:] for row in rows), strict=True)]


def _mean(cells: Sequence[Any]) -> float | None:
    # Intervals are over tasks; a mean of them is none.
    if any(not isinstance(cell, int | float) for cell in cells):
        return None
    return float(np.mean(cells))
