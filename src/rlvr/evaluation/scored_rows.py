"""Results of a verifier on labelled rows: each a formula over sums of counts of the rows, with a bootstrap interval.

Invariant: rows are what is resampled, so that the pairs or steps of one row are not taken for independent ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.errors import DataError
from rlvr.evaluation.calibration import brier_score, calibration_error, rank_correlation, ranking_auc
from rlvr.evaluation.estimators import percentile_interval, resampled_sums

Sums = Mapping[str, np.ndarray]
"""Count -> its sum over rows, [N] for N sets of rows."""
Formula = Callable[[Sums], np.ndarray]
"""Sums -> the result [N], NaN where it has no value."""
Point = tuple[float, float]


@dataclass(frozen=True)
class ScoredRow:
    """One row with its verdicts, in numbers."""

    id: str
    source: str | None
    counts: Mapping[str, float]
    """Numbers whose sums over rows the results are made of; the same names for all rows of a kind."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """The verifier's scores, None for undecided, as they are written."""
    rated: Sequence[Point] = ()
    """(score, 1 for right or 0 for wrong) of what calibration is measured on."""
    outcomes: Sequence[Point] = ()
    """(score of a whole response, 1 for right or 0 for wrong)."""
    lengths: Sequence[Point] = ()
    """(difference of two scores, difference of the two lengths)."""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "source": self.source, "counts": dict(self.counts), **self.scores}


@dataclass(frozen=True)
class RowKind:
    """The results on one kind of rows."""

    name: str
    formulas: Mapping[str, Formula]
    main: str
    """The result that is shown for each source."""


def ratio(part: str, whole: str) -> Formula:
    """The formula of one sum divided by another."""
    return lambda sums: quotient(sums[part], sums[whole])


def share(hits: str, others: str) -> Formula:
    """The formula of one sum among it and another."""
    return lambda sums: quotient(sums[hits], sums[hits] + sums[others])


def f1_score(hits: str, false: str, missed: str) -> Formula:
    """The formula of the harmonic mean of precision and recall; 0 where there is no hit."""
    # 2 TP / (2 TP + FP + FN), which has a value where nothing is accepted, too.
    return lambda sums: quotient(2 * sums[hits], 2 * sums[hits] + sums[false] + sums[missed])


def quotient(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """[N]: part / whole, NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) > 0)


def harmonic_mean(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """[N]: 2 a b / (a + b) of shares; 0 where both are 0, NaN where one is NaN."""
    total = first + second
    return np.divide(2 * first * second, total, out=np.where(np.isnan(total), np.nan, 0.0), where=total > 0)


def row_results(rows: Sequence[ScoredRow], kind: RowKind) -> dict[str, Any]:
    """The results of a kind on its rows, each with `... interval`; those without a value are left out."""
    results: dict[str, Any] = {"tasks": len(rows)}
    columns, names = _columns([row.counts for row in rows])
    drawn = dict(zip(names, resampled_sums(columns), strict=True))
    whole = dict(zip(names, columns.sum(axis=1, keepdims=True), strict=True))
    for name, formula in kind.formulas.items():
        value = float(formula(whole)[0])
        if not np.isnan(value):
            results[name] = value
            results[f"{name} interval"] = percentile_interval(formula(drawn))
    return results | _statistics(rows)


def results_by_source(rows: Sequence[ScoredRow], kind: RowKind) -> dict[str, dict[str, Any]]:
    """Source -> the results on its rows, in the order of first appearance."""
    sources = dict.fromkeys(row.source for row in rows)
    return {str(source): row_results([row for row in rows if row.source == source], kind) for source in sources}


def mean_over_sources(by_source: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Result -> its mean over the sources, each with the same weight; only where every source has it."""
    names = [name for name in next(iter(by_source.values())) if name != "tasks" and not name.endswith(" interval")]
    return {
        name: float(np.mean([results[name] for results in by_source.values()]))
        for name in names
        if all(name in results for results in by_source.values())
    }


def row_differences(
    before: Mapping[str, Mapping[str, float]], rows: Sequence[ScoredRow], kind: RowKind
) -> dict[str, Any]:
    """The change of each result from `before`, counts by id, on the rows that both have, with paired intervals: the
    same rows are drawn for both. DataError where they have no row in common."""
    common = [row for row in rows if row.id in before]
    if not common:
        raise DataError("the two evaluations have no row in common: only results on the same rows can be compared")
    old, names = _columns([before[row.id] for row in common])
    new, _ = _columns([row.counts for row in common])
    drawn = resampled_sums(np.concatenate([old, new]))
    differences = {}
    for name, formula in kind.formulas.items():
        first, last = (
            float(formula(dict(zip(names, side.sum(axis=1, keepdims=True), strict=True)))[0]) for side in (old, new)
        )
        if np.isnan(first) or np.isnan(last):
            continue
        resampled = [formula(dict(zip(names, side, strict=True))) for side in np.split(drawn, 2)]
        differences[name] = {
            "before": first,
            "after": last,
            "difference": last - first,
            "interval": percentile_interval(resampled[1] - resampled[0]),
        }
    return {
        "tasks": len(common),
        "only_before": len(before) - len(common),
        "only_after": len(rows) - len(common),
        "differences": differences,
    }


def read_row_counts(path: Path, kind: RowKind, name: str) -> dict[str, dict[str, float]]:
    """Id -> counts of a result that was written, of the data set `name` where it has several. DataError where it is no
    such result."""
    try:
        written: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        written = written["benchmarks"][name] if "benchmarks" in written else written
        if written.get("rows") != kind.name:
            raise DataError(f"{path} is no result on {kind.name}")
        wanted = {*written["by_task"][0]["counts"]}
        counts = {row["id"]: {count: float(row["counts"][count]) for count in wanted} for row in written["by_task"]}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    # Whatever a JSON file of somebody else makes of it.
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is no result of rlvr.evaluate on {kind.name}") from error
    return counts


def _columns(counts: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, list[str]]:
    """float64 [C, T]: a column for each of the C names, and the names."""
    names = sorted(counts[0])
    return np.asarray([[row[name] for row in counts] for name in names], dtype=np.float64), names


def _statistics(rows: Sequence[ScoredRow]) -> dict[str, float]:
    """The results that are no formula of sums, without intervals. Calibration has a meaning for scores in [0, 1]
    alone."""
    found: dict[str, float | None] = {}
    lengths = np.asarray([point for row in rows for point in row.lengths], dtype=np.float64).reshape(-1, 2)
    if len(lengths):
        found["length_correlation"] = rank_correlation(lengths[:, 0], lengths[:, 1])
    outcomes = np.asarray([point for row in rows for point in row.outcomes], dtype=np.float64).reshape(-1, 2)
    if len(outcomes):
        found["outcome_auc"] = ranking_auc(outcomes[:, 0], outcomes[:, 1])
    rated = np.asarray([point for row in rows for point in row.rated], dtype=np.float64).reshape(-1, 2)
    if len(rated) and rated[:, 0].min() >= 0 and rated[:, 0].max() <= 1:
        found["calibration_error"] = calibration_error(rated[:, 0], rated[:, 1])
        found["brier"] = brier_score(rated[:, 0], rated[:, 1])
    return {name: value for name, value in found.items() if value is not None}
