"""Problems with help in their prompt, for the evaluations of docs/analysis.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlvr.data.sources import load_tasks
from rlvr.errors import ConfigError, DataError
from rlvr.records import Task
from rlvr.registry import register

TEXTS = {
    "planning": "{prompt}\n\nA plan that you may follow or change:\n{help}",
    "knowledge": "{prompt}\n\nFacts that may be of use:\n{help}",
}
"""Column -> the text of the prompt. The columns are those of the authors' evaluation, the wording is ours."""


@register("source", "helped_problems")
def helped_problems(
    *, data: Any, column: str, text: str | None = None, split: str = "eval", fields: dict[str, Any] | None = None
) -> Iterator[Task]:
    """The tasks of `data` with the text of their column `column` put into the prompt, under their own ids.

    As `doc_to_text_plan` and `doc_to_text_knowledge` of eval/lm-evaluation-harness/lm_eval/tasks/sparkle/utils.py in
    sparkle-reasoning/sparkle, commit c3581c9, whose columns are `planning` and `knowledge`. `text` has the slots
    {prompt} and {help}; without it the column is one of these two. Ids stay, so that results with and without help are
    compared problem by problem. ConfigError for a text without its slots; DataError for a task without the column, or
    with a prompt that is no text.
    """
    around = TEXTS.get(column) if text is None else text
    if around is None or "{prompt}" not in around or "{help}" not in around:
        raise ConfigError(f"helped_problems: give `text` with the slots {{prompt}} and {{help}} for column {column!r}")
    before, _, after = around.partition("{help}")
    for task in load_tasks(data, split=split, fields=fields):
        given = task.info.get(column)
        if not isinstance(given, str) or not given:
            raise DataError(f"{task.named} has no text in the column {column!r}: there is nothing to help with")
        if not isinstance(task.prompt, str):
            raise DataError(f"{task.named}: helped_problems puts help into a text, and the prompt is a chat")
        parts = [part.replace("{prompt}", task.prompt) for part in (before, after)]
        # Another prompt, the same problem: the id is kept.
        yield dataclasses.replace(task, prompt=given.join(parts))
