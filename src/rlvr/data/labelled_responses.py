"""Rows with a completion of a task and, in `expected`, whether it is right: what verifiers are compared with.

Invariant: a row that cannot be read is a row with a `problem`, so that the others are not lost with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr.data.files import numbered_lines
from rlvr.data.row_adapters import to_task
from rlvr.errors import DataError
from rlvr.records import Task


@dataclass(frozen=True)
class LabelledRow:
    """A task and a completion, or the reason why the row cannot be read."""

    id: Any
    completion: str = ""
    task: Task | None = None
    expected: bool | None = None
    problem: str = ""

    @property
    def responses(self) -> tuple[str, ...]:
        """The completion alone."""
        return (self.completion,)


def read_labelled_rows(path: Path) -> Iterator[LabelledRow]:
    """The rows of a file of JSON lines, read as they are asked for; blank lines are passed over."""
    for number, line in numbered_lines(path):
        place = f"line {number}"
        try:
            fields = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            yield LabelledRow(place, problem=f"{place} is not valid JSON: {error}")
            continue
        yield labelled_row(fields, place)


def labelled_row(fields: Any, place: str) -> LabelledRow:
    """The row that `fields` describe; `place` names it in what is wrong with it, and where it has no id."""
    if not isinstance(fields, Mapping):
        return LabelledRow(place, problem=f"{place} is not an object with a `completion`")
    fields = dict(fields)
    row_id = fields.get("id")
    if not isinstance(row_id, (str, int)) or isinstance(row_id, bool):
        row_id = place
    try:
        return LabelledRow(row_id, _completion(fields, place), _task(fields, place), _expected(fields, place))
    except DataError as error:
        return LabelledRow(row_id, problem=str(error))


def _completion(fields: dict[str, Any], place: str) -> str:
    """The completion's text; of chat messages, the last one."""
    if "completion" not in fields:
        raise DataError(f"{place} has no field 'completion' (it has {', '.join(fields) or 'nothing'})")
    value = fields.pop("completion")
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise DataError(
            f"{place}: field 'completion' must be text or a list of chat messages, not {type(value).__name__}"
        )
    return value


def _task(fields: dict[str, Any], place: str) -> Task:
    """The row's task; unlike one to train on, it may be without a prompt."""
    fields = {name: value for name, value in fields.items() if name != "expected"}
    written = any(fields.get(name) is not None for name in ("prompt", "messages")) and fields.get("prompt") != ""
    # GSM8K's form: the worked solution in `answer` ends with `#### 42`, and the prompt is in `question`.
    worked = isinstance(fields.get("answer"), str) and "####" in fields["answer"]
    if written or (worked and "question" in fields):
        return to_task(fields, place=place)
    question = fields.get("question")
    prompt = question if isinstance(question, str) else ""
    return replace(to_task({**fields, "prompt": prompt or "-"}, place=place), prompt=prompt)


def _expected(fields: dict[str, Any], place: str) -> bool | None:
    value = fields.get("expected")
    if value is None or isinstance(value, bool):
        return value
    if value in (0, 1):
        return bool(value)
    raise DataError(f"{place}: field 'expected' must be true or false, not {value!r}")
