"""Preference rows as tasks for a judge: which of two responses is the better one?

Two responses to a prompt, one chosen and one rejected, become a question whose answer is A or B; which stands first is
decided by a hash of the row, so that neither place is right more often. For verifiers of choices and labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlvr.core.seeding import seed_of
from rlvr.data.sources import load_tasks
from rlvr.errors import DataError
from rlvr.records import Task
from rlvr.registry import register

TEMPLATE = (
    "Which of two responses to a request is the better one?\n\n# Request\n{prompt}\n\n# Response A\n{a}\n\n# "
    "Response B\n{b}\n\n"
    "Reason first, then give your verdict."
)


@register("source", "preferences")
def preferences(
    *,
    data: Any,
    split: str = "train",
    template: str = TEMPLATE,
    both_orders: bool = False,
    fields: dict[str, Any] | None = None,
    seed: int = 0,
) -> Iterator[Task]:
    """One task, or with `both_orders` two, for each row of `data`, a data set as `data.train` takes it, whose rows have
    `prompt`, `chosen` and `rejected` (texts, or messages of which the last one counts).

    `template` has the slots {prompt}, {a} and {b}. The answer is A or B; info.labels are both. DataError names a row
    that lacks a response.
    """
    for task in load_tasks(data, split=split, fields=fields):
        pair = [_text(task, name) for name in ("chosen", "rejected")]
        # By the row's id: half of the rows have the chosen response first, whatever part of the data is loaded.
        first = seed_of("preference", seed, task.id) % 2
        for swap in (first, 1 - first) if both_orders else (first,):
            a, b = pair[::-1] if swap else pair
            parts = {"{prompt}": _last(task.prompt), "{a}": a, "{b}": b}
            yield Task(
                id=f"{task.id}-{'ba' if swap else 'ab'}",
                prompt=[{"role": "user", "content": _filled(template, parts)}],
                answer="B" if swap else "A",
                info={"labels": ["A", "B"]},
                source=task.source,
            )


def _filled(template: str, parts: dict[str, str]) -> str:
    """The template with its slots filled at once, so that a response that reads like a slot is not filled."""
    return re.sub("|".join(map(re.escape, parts)), lambda slot: parts[slot[0]], template)


def _text(task: Task, name: str) -> str:
    value = task.info.get(name)
    if not value or not isinstance(value, (str, list)):
        raise DataError(f"preferences: the row of {task.named} has no {name!r}: prompt, chosen and rejected are needed")
    return _last(value)


def _last(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value[-1].get("content", ""))
