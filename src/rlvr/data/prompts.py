"""Prompts as token ids, rendered once per task, and the replies that follow a turn of the policy's."""

from __future__ import annotations

from typing import Any

from rlvr.data.replies import Frame, frame_of, reply_ids
from rlvr.data.templates import Template, render_prompt
from rlvr.data.tokenizer_copy import TokenizerCopy
from rlvr.records import Task


class Prompts:
    """The token ids of tasks' prompts under one template; calling it with a task gives them.

    Threads may share it: it encodes with a copy of the tokenizer.
    """

    def __init__(self, tokenizer: Any, template: Any = None) -> None:
        self._tokenizer = TokenizerCopy(tokenizer)
        self._template = Template.parse(template)
        self._ids: dict[str, tuple[int, ...]] = {}
        self._frames: dict[str, Frame] = {}

    def __call__(self, task: Task) -> tuple[int, ...]:
        key = repr(task.prompt)  # not the id: training and evaluation tasks may share one, and a task may be rewritten
        if key not in self._ids:
            with self._tokenizer as tokenizer:
                self._ids[key] = tuple(render_prompt(task, tokenizer, self._template))
        return self._ids[key]

    def reply(self, task: Task, text: str, role: str, end: int | None) -> tuple[int, ...]:
        """The token ids that put `text`, said by `role`, behind a turn of the policy's in the task's context.

        `end` is the end-of-turn token that the policy sampled, None where a stop string ended the turn. ConfigError where the
        prompt is a chat and its template takes no such message.
        """
        is_text = isinstance(self._template.apply(task.prompt), str)
        with self._tokenizer as tokenizer:
            if is_text:
                return tuple(reply_ids(text, tokenizer, None, end))
            if role not in self._frames:
                self._frames[role] = frame_of(tokenizer, role, self._template.options)
            return tuple(reply_ids(text, tokenizer, self._frames[role], end))
