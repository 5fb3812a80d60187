"""Rows of process data: a problem with the steps of a solution and labels of them.

- `problem, steps, label`: the number of the first wrong step, from 0, or -1 where none is, and `final_answer_correct`
  (Qwen/ProcessBench; QwenLM/ProcessBench@e802463 README.md)
- `prompt, completions, labels`: whether each step is right (TRL's stepwise supervision, as trl-lib/prm800k)
- the same with `ratings` of -1 (wrong), 0 and 1, as PRM800K's (openai/prm800k, README.md): 0, neutral, counts as right,
  as the card of Qwen/Qwen2.5-Math-7B-PRM800K has it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rlvr.data.preference_rows import has_prompt, missing_prompt, row_columns, task_of_columns
from rlvr.errors import DataError
from rlvr.records import Task

BORDER = "\n\n"
"""Text between two steps of the response that a verifier is shown."""


@dataclass(frozen=True)
class StepRow:
    """A solution by steps."""

    task: Task
    steps: tuple[str, ...]
    wrong: tuple[bool | None, ...]
    """For each step, True if it is wrong; None where there is no label: after the first wrong one of ProcessBench."""
    final_answer_correct: bool | None = None

    @property
    def responses(self) -> tuple[str, ...]:
        """The solution as one text."""
        return (BORDER.join(self.steps),)

    @property
    def first_wrong(self) -> int:
        """The number of the first wrong step; -1 where none is."""
        return self.wrong.index(True) if True in self.wrong else -1

    @property
    def places(self) -> list[tuple[int, int]]:
        """(first character, past-the-end character) of each step in the text."""
        places = []
        start = 0
        for step in self.steps:
            places.append((start, start + len(step)))
            start += len(step) + len(BORDER)
        return places


def step_rows(rows: Iterable[tuple[str, Any]], source: str) -> Iterator[StepRow]:
    """The rows of a data set, given with their places; `source` is that of rows that name none. DataError names the
    place of a row that is none."""
    for place, row in rows:
        columns = row_columns(row, place, "a problem and its steps")
        if not has_prompt(columns):
            raise missing_prompt(list(columns), place)
        name = "steps" if "steps" in columns else "completions"
        steps = columns.pop(name, None)
        if not isinstance(steps, (list, tuple)) or not steps or not all(isinstance(step, str) for step in steps):
            raise DataError(f"{place}: field 'steps' (or 'completions') must be a list of texts, at least one")
        wrong = _wrong(columns, len(steps), place)
        correct = columns.pop("final_answer_correct", None)
        if correct is not None and correct not in (0, 1):
            raise DataError(f"{place}: field 'final_answer_correct' must be true or false, not {correct!r}")
        task = task_of_columns(columns, place, source)
        yield StepRow(task, tuple(steps), wrong, None if correct is None else bool(correct))


def _wrong(columns: dict[str, Any], count: int, place: str) -> tuple[bool | None, ...]:
    """The labels of the steps, taken out of the columns."""
    for name, known in (("labels", (0, 1)), ("ratings", (-1, 0, 1))):
        if name in columns:
            labels = columns.pop(name)
            if not isinstance(labels, (list, tuple)) or len(labels) != count:
                raise DataError(f"{place}: field {name!r} must have a label for each of the {count} steps")
            if any(label is not None and label not in known for label in labels):
                allowed = "true or false" if name == "labels" else "-1, 0 or 1"
                raise DataError(f"{place}: a label in {name!r} is {allowed}, not {labels!r}"[:400])
            least = known[0]
            return tuple(None if label is None else label == least for label in labels)
    first = columns.pop("label", None)
    if isinstance(first, bool) or not isinstance(first, int) or not -1 <= first < count:
        raise DataError(
            f"{place}: field 'label' must be the number of the first wrong of the {count} steps, from 0, or -1 where "
            f"none is, not {first!r}; or give 'labels' with true or false for each step"
        )
    if first == -1:
        return (False,) * count
    return (False,) * first + (True,) + (None,) * (count - first - 1)
