"""Sets of labelled rows that verifiers are evaluated on: published ones by name, or files and hub data sets.

The published ones lie in verifier_benchmarks.yaml beside this file, each with the place where its form and its measure
were read and with what differs here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from rlvr.data.files import SUFFIXES
from rlvr.data.labelled_responses import LabelledRow, labelled_row
from rlvr.data.preference_rows import PreferenceRow, preference_rows, unique_ids
from rlvr.data.sources import limited, open_rows
from rlvr.data.step_rows import StepRow, step_rows
from rlvr.errors import ConfigError, DataError, nearest

FILE = Path(__file__).with_name("verifier_benchmarks.yaml")
Kind = Literal["preferences", "steps", "responses"]
EvaluatedRow = PreferenceRow | StepRow | LabelledRow


class VerifierBenchmark(BaseModel):
    """One published set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    rows: Kind
    data: dict[str, str]
    """Source of the rows that name none -> the data set, as `data.eval` writes it."""
    styled: bool = False
    """The responses of a row are in the order of their styles."""
    source: str
    """The places where form and measure were read: repository, commit and file."""
    differs: str = ""
    """Differences from the source; empty: none that is known."""


@dataclass(frozen=True)
class RowSet:
    """The rows of one set."""

    name: str
    data: Mapping[str, str]
    rows: list[Any]
    """Of one of the types of `EvaluatedRow`, with unique ids."""
    benchmark: VerifierBenchmark | None = None


@functools.cache
def verifier_benchmarks() -> dict[str, VerifierBenchmark]:
    """Name -> published set."""
    written: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {name: VerifierBenchmark(name=name, **entry) for name, entry in written.items()}


def read_row_sets(
    kind: Kind,
    words: Iterable[str],
    fields: Mapping[str, Any] | None = None,
    limit: int | None = None,
    limit_seed: int | None = None,
) -> list[RowSet]:
    """The sets that `words` name, several of a word separated by commas: `NAME`, `NAME=DATA` with rows of the same
    columns, or DATA alone.

    `fields` maps our names of columns to those of the rows; of each set `limit` rows are read, as `limited` draws them.
    ConfigError for a name that is none or of another kind of rows, DataError for rows that cannot be read.
    """
    sets: dict[str, RowSet] = {}
    for word in (part.strip() for written in words for part in written.split(",")):
        row_set = _row_set(kind, word, fields)
        if row_set.name in sets:
            raise ConfigError(f"two sets of rows are called {row_set.name!r}: evaluate them apart")
        sets[row_set.name] = replace(row_set, rows=limited(row_set.rows, limit, limit_seed))
    return list(sets.values())


def _row_set(kind: Kind, word: str, fields: Mapping[str, Any] | None) -> RowSet:
    known = verifier_benchmarks()
    name, _, data = word.partition("=")
    if name in known:
        benchmark = known[name]
        if benchmark.rows != kind:
            raise ConfigError(f"{name} has {benchmark.rows}: evaluate on it with --{benchmark.rows} {name}")
        sources = {name: data} if data else benchmark.data
        return RowSet(name, sources, _rows(kind, name, sources, fields), benchmark)
    if "/" not in word and not word.endswith(SUFFIXES) and not Path(word).exists():
        of_kind = [one.name for one in known.values() if one.rows == kind]
        raise ConfigError(
            f"there are no {kind} {word!r}: give a file, a hub data set or a name{nearest(word, of_kind)}"
        )
    name = Path(word.partition(":")[0]).stem
    return RowSet(name, {name: word}, _rows(kind, name, {name: word}, fields))


def _rows(kind: Kind, name: str, data: Mapping[str, str], fields: Mapping[str, Any] | None) -> list[Any]:
    """The rows of data sets, in order, with unique ids."""
    rows: list[Any] = []
    for source, written in data.items():
        placed = _renamed(open_rows(written)[0], fields)
        match kind:
            case "preferences":
                rows += preference_rows(placed, source)
            case "steps":
                rows += step_rows(placed, source)
            case "responses":
                rows += (_expecting(labelled_row(row, place), place, source) for place, row in placed)
    if not rows:
        raise DataError(f"{', '.join(data.values())} has no row to evaluate on")
    tasks = unique_ids([row.task for row in rows], name)
    return [replace(row, task=task) for row, task in zip(rows, tasks, strict=True)]


def _expecting(row: LabelledRow, place: str, source: str) -> LabelledRow:
    """A readable row with a label. DataError for any other one."""
    if row.task is None:
        raise DataError(row.problem)
    if row.expected is None:
        raise DataError(f"{place}: there is no field 'expected', which says whether the completion is right")
    # A row without an id is named by its place, which another machine does not have.
    own_id = "" if row.id == place else str(row.id)
    return replace(row, task=replace(row.task, id=own_id, source=row.task.source or source))


def _renamed(rows: Iterator[tuple[str, Any]], fields: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """The rows with our names of the columns that `fields` maps."""
    for place, row in rows:
        if not fields or not isinstance(row, Mapping):
            yield place, row
            continue
        for ours, column in fields.items():
            if column not in row:
                raise DataError(f"{place}: there is no field {column!r}, which data.fields gives for {ours!r}")
        taken = set(fields.values())
        rest = {name: value for name, value in row.items() if name not in taken}
        yield place, {**rest, **{ours: row[column] for ours, column in fields.items()}}
