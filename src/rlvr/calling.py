"""Plain functions as pieces: they receive by name what their signature asks for.

Names: prompt, messages, completion, answer, task, token_ids, and any field of the task's info; a function with `**kwargs`
receives everything. Invariant: the signature is read once, when the piece is made, and a name that cannot be had is an
error that says which task lacks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rlvr.errors import ConfigError
from rlvr.records import Rollout, Task

FIELDS = ("prompt", "messages", "completion", "answer", "task", "token_ids")
"""What every plain function may ask for; a task's info adds to it."""


class ByName:
    """A plain function together with the names that it asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = name_of(function)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the signature of {self.name!r} cannot be read: {error}") from error
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(f"the function {self.name!r} has positional-only parameters, but it is called by name")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = [p.name for p in named if p.default is p.empty]
        self.optional = [p.name for p in named if p.default is not p.empty]
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def missing(self, task: Task) -> str | None:
        """What the function asks for and `task` does not have, in words; None when all is there."""
        known = _known(task, "", None)
        missing = [name for name in self.required if name not in known]
        if not missing:
            return None
        return f"the function {self.name!r} asks for {missing[0]!r}, which is neither a field of task {task.id!r} nor in its info"

    def __call__(self, task: Task, completion: str, rollout: Rollout | None = None) -> Any:
        """Call the function on one completion. ConfigError when it asks for something that the task lacks."""
        known = _known(task, completion, rollout)
        if not self.takes_all:
            if any(name not in known for name in self.required):
                raise ConfigError(self.missing(task) or "")
            known = {name: known[name] for name in (*self.required, *self.optional) if name in known}
        return self.function(**known)


def name_of(function: Callable[..., Any]) -> str:
    """How a function is called in messages and columns; a partial is called as what it binds."""
    return getattr(getattr(function, "func", function), "__name__", type(function).__name__)


def _known(task: Task, completion: str, rollout: Rollout | None) -> dict[str, Any]:
    messages = task.prompt if isinstance(task.prompt, list) else [{"role": "user", "content": task.prompt}]
    return {
        **task.info,
        "task": task,
        "prompt": task.prompt,
        "messages": messages,
        "answer": task.answer,
        "completion": completion,
        "token_ids": None if rollout is None else rollout.token_ids[rollout.sampled].tolist(),
    }
