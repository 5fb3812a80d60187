"""Recorded rollouts read back: the files that `rollout_log` writes.

Invariants: one line is in memory at a time; a rollout in a line without `use` (of an older version) is
taken to have trained; a line that cannot be read is named by file and line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.core.tree import read_mapping
from rlvr.errors import DataError
from rlvr.records import BASELINE, Rollout

COMPUTED = ("advantage", BASELINE)
"""Columns of a batch that come after scoring."""


@dataclass(frozen=True)
class Recorded:
    """One line of a file."""

    rollout: Rollout
    use: str
    """The use of the rollout (see `rollout_log`)."""
    columns: Mapping[str, float]
    """Its columns in the batch that trained, NaN where undecided; of one that did not train, as scored."""
    scored: Mapping[str, float]
    """Its columns as scoring gave them, NaN where undecided."""
    line: int
    """The number of its line, from 1."""


def recorded_steps(run: str | Path) -> dict[int, Path]:
    """The files of a run's recorded rollouts by step, in order. DataError where there are none."""
    run = Path(run)
    if not run.is_dir():
        raise DataError(f"{run} is a file, not a run folder" if run.exists() else f"there is no run folder {run}")
    files = rollout_files(run)
    if not files:
        raise DataError(
            f"{run} holds no recorded rollouts: {run / 'rollouts'} is missing or empty. A run records them where "
            "logging.rollouts is 1 or more and a step was finished"
        )
    return files


def rollout_files(run: Path) -> dict[int, Path]:
    """The files of a run's recorded rollouts by step, in order; empty where there are none."""
    names = {path.stem.removeprefix("step-"): path for path in (run / "rollouts").glob("step-*.jsonl")}
    return dict(sorted((int(number), path) for number, path in names.items() if number.isdigit()))


def ranges(steps: list[int]) -> str:
    """Steps in words: `1-3, 7`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], step]
        else:
            parts.append([step])
    shown = ["-".join(map(str, part)) for part in parts]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:5], "...", shown[-1]])


def recorded_config(run: str | Path) -> dict[str, Any]:
    """The tree in a run's config.yaml; empty where there is no such file. ConfigError where it holds no
    configuration."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        return {}
    return read_mapping(path)


def read_recorded(path: str | Path, notes: list[str] | None = None) -> Iterator[Recorded]:
    """The rollouts of a file, in order. DataError, with file and line, for a line that is no rollout.

    With `notes` reading ends before such a line instead, and a note says so.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                # Every exception that a wrong type, a missing key or a nesting beyond Python's stack raises while a
                # line is read.
                recorded = _recorded(line, number)
            except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
                what = "it is cut"
                if line.endswith("\n"):
                    what = f"{type(error).__name__}: {error}"
                if notes is None:
                    raise DataError(
                        f"{path}, line {number}: not a rollout: {what}; copy the file anew, or leave this step and "
                        "those after it out"
                    ) from error
                notes.append(f"{path}, line {number}: not a rollout ({what}); the file is used up to there")
                return
            yield recorded


def _recorded(line: str, number: int) -> Recorded:
    row = json.loads(line)
    final = _numbers(row.pop("columns", {}))
    # Scoring's own columns: those of the batch less what came later, and over them the values that were changed since.
    scored = {name: value for name, value in final.items() if name not in COMPUTED} | _numbers(row.pop("scored", {}))
    use = str(row.pop("use", "trained"))
    # Rounded, and for looking at only: nothing is computed from them.
    row.pop("tokens", None)
    return Recorded(Rollout.from_json(row), use, final, scored, number)


def _numbers(columns: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in columns.items()}


def read_rollouts(path: str | Path) -> tuple[list[Rollout], dict[str, np.ndarray]]:
    """The rollouts of a file and their columns, float64 [B] with NaN for undecided. DataError as `read_recorded`."""
    rows = list(read_recorded(path))
    return [row.rollout for row in rows], columns_of([row.columns for row in rows])


def columns_of(rows: list[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """One array per name, float64 [B], of one mapping per rollout; NaN where it has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.asarray([row.get(name, math.nan) for row in rows], dtype=np.float64) for name in names}
