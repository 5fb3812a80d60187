"""Prompts as token ids, rendered once per task."""

from __future__ import annotations

from typing import Any

from rlvr.data.templates import Template, render_prompt
from rlvr.records import Task


class Prompts:
    """The token ids of tasks' prompts under one template; calling it with a task gives them."""

    def __init__(self, tokenizer: Any, template: Any = None) -> None:
        self._tokenizer = tokenizer
        self._template = Template.parse(template)
        self._ids: dict[str, tuple[int, ...]] = {}

    def __call__(self, task: Task) -> tuple[int, ...]:
        key = repr(task.prompt)  # not the id: training and evaluation tasks may share one, and a task may be rewritten
        if key not in self._ids:
            self._ids[key] = tuple(render_prompt(task, self._tokenizer, self._template))
        return self._ids[key]
