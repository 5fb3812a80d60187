"""Plain functions as components: they receive by name what their signature asks for.

One completion at a time (`ByName`): prompt, messages, completion, answer, task, token_ids, and any field of the task's
info. A whole group at a time, as TRL calls reward functions (`ByColumns`): prompts, completions, completion_ids, and
lists of the same fields. A function with `**kwargs` receives everything. Invariant: the signature is read once, when
the component is made, and a name that cannot be had is an error that says which task lacks it.

A function of one completion that asks for `solution_str` has verl's form, `compute_score(data_source, solution_str,
ground_truth, extra_info)`: verl's NaiveRewardManager (verl/workers/reward_manager/naive.py) calls it with these four
keywords, and takes the `score` of a dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr.errors import ConfigError
from rlvr.records import Rollout, Task

FIELDS = (
    *("prompt", "messages", "completion", "answer", "task", "token_ids"),
    *("prompts", "completions", "completion_ids"),
)
"""What plain functions may ask for; a task's info adds to it."""


ANSWER_NAMES = ("answer", "solution", "ground_truth")
"""What TRL's users call the column that becomes a task's answer."""

_TRAINERS_OWN = ("trainer_state", "log_extra", "log_metric", "environments")


class _Function:
    """A plain function together with the names that it asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = name_of(function)
        parameters = _parameters(function)
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(f"the function {self.name!r} has positional-only parameters, but it is called by name")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = [p.name for p in named if p.default is p.empty]
        self.optional = [p.name for p in named if p.default is not p.empty]
        self.has_verl_form = "solution_str" in (*self.required, *self.optional)
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def _lack(self, known: Mapping[str, Any], task: Task) -> str | None:
        missing = next((name for name in self.required if name not in known), None)
        if missing is None:
            return None
        if missing in _TRAINERS_OWN:
            return (
                f"the function {self.name!r} asks for {missing!r}, which is of TRL's trainer and not to be had here: "
                "give the parameter a default"
            )
        return (
            f"the function {self.name!r} asks for {missing!r}, which is neither a field of {task.named} nor in its info"
        )

    def _call(self, known: dict[str, Any], task: Task) -> Any:
        if (problem := self._lack(known, task)) is not None:
            raise ConfigError(problem)
        if not self.takes_all:
            known = {name: known[name] for name in (*self.required, *self.optional) if name in known}
        return self.function(**known)


class ByName(_Function):
    """A plain function of one completion."""

    def missing(self, task: Task) -> str | None:
        """Return what the function asks for and `task` does not have, in words; None when all is there."""
        return self._lack(self._fields(task, "", None), task)

    def __call__(self, task: Task, completion: str, token_ids: Sequence[int] | None = None) -> Any:
        """Call the function on one completion. ConfigError when it asks for something that the task lacks."""
        return self._call(self._fields(task, completion, token_ids), task)

    def _fields(self, task: Task, completion: str, token_ids: Sequence[int] | None) -> dict[str, Any]:
        if self.has_verl_form:
            return _known(task, completion, token_ids) | _verl_arguments(task, completion)
        return _known(task, completion, token_ids)


class ByColumns(_Function):
    """A plain function of all completions of a prompt, in TRL's form: `f(prompts, completions, **columns) -> list`."""

    def missing(self, task: Task) -> str | None:
        """Return what the function asks for and `task` does not have, in words; None when all is there."""
        return self._lack(_columns(task, [], []), task)

    def __call__(self, task: Task, completions: Sequence[str], token_ids: Sequence[Sequence[int] | None]) -> Any:
        """Call the function on the completions. ConfigError when it asks for something that the task lacks."""
        return self._call(_columns(task, completions, token_ids), task)


def by_signature(function: Callable[..., Any]) -> ByName | ByColumns:
    """The function ready to be called: in TRL's form when it asks for `prompts` or `completions`."""
    asked = {p.name for p in _parameters(function) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if asked & {"prompts", "completions"}:
        return ByColumns(function)
    return ByName(function)


def sampled_ids(rollout: Rollout | None) -> list[int] | None:
    """The token ids that the policy wrote; None where there is no rollout."""
    if rollout is None:
        return None
    return rollout.token_ids[rollout.sampled].tolist()


def name_of(function: Callable[..., Any]) -> str:
    """Return how a function is called in messages and columns; a partial is called as what it binds."""
    return getattr(getattr(function, "func", function), "__name__", type(function).__name__)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the signature of {name_of(function)!r} cannot be read: {error}") from error


def _known(task: Task, completion: str, token_ids: Sequence[int] | None) -> dict[str, Any]:
    if isinstance(task.prompt, list):
        messages = task.prompt
    else:
        messages = [{"role": "user", "content": task.prompt}]
    return {
        **task.info,
        "task": task,
        "prompt": task.prompt,
        "messages": messages,
        "answer": task.answer,
        "completion": completion,
        "token_ids": token_ids,
    }


def _verl_arguments(task: Task, completion: str) -> dict[str, Any]:
    return {
        "data_source": task.source,
        "solution_str": completion,
        "ground_truth": task.answer,
        "extra_info": dict(task.info),
    }


def score_of(result: Any) -> Any:
    """Return what a function returned, or its `score` where that is a mapping with one, as verl's functions may
    return."""
    if isinstance(result, Mapping) and "score" in result:
        return result["score"]
    return result


def _columns(task: Task, completions: Sequence[str], token_ids: Sequence[Sequence[int] | None]) -> dict[str, Any]:
    """TRL's arguments: completions of a chat prompt are lists of one message, every column has one entry each."""
    chat = isinstance(task.prompt, list)
    count = len(completions)
    if task.answer is None:
        answers = {}
    else:
        answers = dict.fromkeys(ANSWER_NAMES, task.answer)
    fields = {**answers, **task.info} | {name: value for name, value in answers.items() if name == "answer"}
    return {
        **{name: [value] * count for name, value in fields.items()},
        "prompts": [task.prompt] * count,
        "completions": [[{"role": "assistant", "content": c}] for c in completions] if chat else list(completions),
        "completion_ids": list(token_ids),
    }
