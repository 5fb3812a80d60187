"""Rows of preference data: a prompt with the responses that are preferred and those that are not.

The forms of public sets are recognised by their columns:

- `prompt, chosen, rejected`, each response a text, or chat messages of which the last one counts: allenai/reward-bench,
  allenai/preference-test-sets, UltraFeedback. Without `prompt` the messages of `chosen` before the last one are it
  (allenai/reward-bench@05a9005 rewardbench/utils.py, load_and_process_dataset).
- the same with lists of texts: allenai/reward-bench-2 (one chosen and three rejected), THU-KEG/RM-Bench (three each)
- two responses and which is better: `response_A, response_B, label: "A>B"` (ScalerLab/JudgeBench@e2c52c2 README.md), or
  `response_a` and `response_b`, or `response_1` and `response_2`, with `winner: model_a` and the like. Rows whose
  winner is a tie are left out.

The prompt may also be called `question`, the source `subset`, `domain` or `source`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.data.row_adapters import to_task
from rlvr.errors import DataError
from rlvr.records import Task

PROMPTS = ("prompt", "question", "problem", "input", "instruction")
SOURCES = ("subset", "domain", "source")
PAIRS = (("response_A", "response_B"), ("response_a", "response_b"), ("response_1", "response_2"))
FIRST = frozenset({"a", "a>b", "a>>b", "[[a]]", "model_a", "response_a", "1", "model_1", "response_1"})
SECOND = frozenset({"b", "b>a", "b>>a", "[[b]]", "model_b", "response_b", "2", "model_2", "response_2"})
TIE = frozenset({"tie", "c", "a=b", "both", "neither", "tie (bothbad)", "tie (both bad)", "bothbad", "equal"})


@dataclass(frozen=True)
class PreferenceRow:
    """A task with responses of which those in `chosen` are preferred to those in `rejected`."""

    task: Task
    chosen: tuple[str, ...]
    rejected: tuple[str, ...]

    @property
    def responses(self) -> tuple[str, ...]:
        """The chosen ones, then the rejected ones."""
        return self.chosen + self.rejected


def preference_rows(rows: Iterable[tuple[str, Any]], source: str) -> Iterator[PreferenceRow]:
    """The rows of a data set, given with their places; `source` is that of rows that name none. Rows whose winner is a
    tie are left out.

    DataError names the place of a row that is none.
    """
    for place, row in rows:
        columns = row_columns(row, place, "a prompt and its responses")
        names = list(columns)
        pair = _labelled_pair(columns, place)
        if pair is None:
            pair = columns.pop("chosen", None), columns.pop("rejected", None)
        elif pair == ():
            continue
        chosen, rejected = pair
        if columns.get("prompt") is None and _is_chat(chosen) and len(chosen) > 1 and not has_prompt(columns):
            columns["prompt"] = list(chosen[:-1])
        answers = [_texts(value, name, place) for name, value in (("chosen", chosen), ("rejected", rejected))]
        if not has_prompt(columns):
            raise missing_prompt(names, place)
        yield PreferenceRow(task_of_columns(columns, place, source), *answers)


def unique_ids(tasks: Sequence[Task], name: str) -> list[Task]:
    """The tasks, those without an id with `name` and their number as one, and a repeated id with a number behind it."""
    seen: Counter[str] = Counter()
    unique = []
    for number, task in enumerate(tasks):
        own = task.id or f"{name}/{number}"
        seen[own] += 1
        unique.append(replace(task, id=own if seen[own] == 1 else f"{own}#{seen[own]}"))
    return unique


def row_columns(row: Any, place: str, holds: str) -> dict[str, Any]:
    """The columns of a row that are not null. DataError for what is no object."""
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: a row is an object with {holds}, not {type(row).__name__}")
    return {name: value for name, value in row.items() if value is not None}


def has_prompt(columns: Mapping[str, Any]) -> bool:
    """Return True if one of the columns is the prompt."""
    return any(name in columns for name in PROMPTS)


def missing_prompt(names: Sequence[str], place: str) -> DataError:
    """The error of a row, with columns of these names, that has no prompt."""
    return DataError(f"{place}: there is no field 'prompt' (the row has {', '.join(names) or 'nothing'})")


def task_of_columns(columns: Mapping[str, Any], place: str, source: str) -> Task:
    """The task of a row with a prompt whose responses have been taken out, its id empty where it has none; other
    columns are in `info`."""
    rest = dict(columns)
    prompt = rest.pop(next(name for name in PROMPTS if name in rest))
    own_id = next((rest[name] for name in ("id", "pair_id", "question_id", "unique_id") if name in rest), "")
    own_source = next((str(rest.pop(name)) for name in SOURCES if name in rest), source)
    written = {"prompt": prompt, "answer": rest.pop("answer", None), "source": own_source}
    info = rest.pop("info", {})
    # Anything else is refused there, with the row's place.
    if isinstance(info, Mapping):
        info = {**info, **{name: value for name, value in rest.items() if name != "id"}}
    return replace(to_task({**written, "info": info}, place=place), id=str(own_id))


def _labelled_pair(columns: dict[str, Any], place: str) -> tuple[Any, ...] | None:
    """(better, worse) of two responses with a label, which are taken out of the columns; empty for a tie, None where
    the row has no such columns."""
    names = next((pair for pair in PAIRS if set(pair) <= set(columns)), None)
    if names is None:
        return None
    label = next((name for name in ("winner", "label", "preference") if name in columns), None)
    if label is None:
        raise DataError(f"{place}: {names[0]} and {names[1]} need a `winner`, such as A or B")
    first, second = (columns.pop(name) for name in names)
    winner = str(columns.pop(label)).strip().lower()
    if winner in FIRST:
        return first, second
    if winner in SECOND:
        return second, first
    if winner in TIE:
        return ()
    raise DataError(f"{place}: field {label!r} says which response is better, such as A, B, A>B or tie, not {winner!r}")


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _texts(value: Any, name: str, place: str) -> tuple[str, ...]:
    """The texts of a response or of several."""
    if isinstance(value, str):
        return (value,)
    if _is_chat(value):
        content = value[-1].get("content")
        if isinstance(content, str):
            return (content,)
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value):
        return tuple(value)
    if value is None:
        raise DataError(f"{place}: there is no field {name!r}: prompt, chosen and rejected are needed")
    raise DataError(f"{place}: field {name!r} must be a text, a list of texts or chat messages")
