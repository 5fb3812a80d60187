"""Plain functions as components: they receive by name what their signature asks for.

One completion at a time (`ByName`): prompt, messages, completion, answer, task, token_ids, and any field of the task's
info. A whole group at a time, as TRL calls reward functions (`ByColumns`): prompts, completions, completion_ids, and
lists of the same fields. A function with `**kwargs` receives everything. Invariant: the signature is read once, when
the component is made, and a name that a task does not have is an error that names the task.

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
"""Argument names that a plain function may ask for; the keys of a task's info are further ones."""


ANSWER_NAMES = ("answer", "solution", "ground_truth")
"""Names that TRL's users give to the column that becomes a task's answer."""

# Arguments that TRL's GRPOTrainer gives to reward functions and that only exist there: functions run in worker
# processes, where there is no trainer.
_TRAINERS_OWN = ("trainer_state", "log_extra", "log_metric")
# A function that asks for one of them has TRL's form.
_COLUMNS = {"prompts", "completions"}


class _Function:
    """A plain function together with the names that it asks for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = name_of(function)
        parameters = _parameters(function)
        # For example `def reward(answer, /)`: which value to give is known by the parameter's name alone.
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ConfigError(f"the function {self.name!r} has positional-only parameters, but it is called by name")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = [p.name for p in named if p.default is p.empty]
        self.optional = [p.name for p in named if p.default is not p.empty]
        names = {p.name for p in named}
        self.has_verl_form = "solution_str" in names
        trainers = [name for name in self.required if name in _TRAINERS_OWN]
        if trainers and names & _COLUMNS:
            raise ConfigError(
                f"the function {self.name!r} asks for {', '.join(trainers)}, which only TRL's trainer has: give "
                f"{'the parameter' if len(trainers) == 1 else 'these parameters'} a default"
            )
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def _lack(self, fields: Mapping[str, Any], task: Task) -> str | None:
        missing = next((name for name in self.required if name not in fields), None)
        if missing is None:
            return None
        if missing in (*_TRAINERS_OWN, "environments"):
            return (
                f"the function {self.name!r} asks for {missing!r}, which only TRL's trainer has: "
                "give the parameter a default"
            )
        return (
            f"the function {self.name!r} asks for {missing!r}, which is neither a field of {task.named} nor in its info"
        )

    def _call(self, fields: dict[str, Any], task: Task) -> Any:
        if (problem := self._lack(fields, task)) is not None:
            raise ConfigError(problem)
        # A function with `**kwargs` gets every field; any other would raise a TypeError for one that it does not name.
        if not self.takes_all:
            fields = {name: fields[name] for name in (*self.required, *self.optional) if name in fields}
        return self.function(**fields)


class ByName(_Function):
    """A plain function of one completion."""

    # Asked for each task before the run starts, so that a slip in a parameter's name does not cost a step of sampling.
    def missing(self, task: Task) -> str | None:
        """Return the fields that the function asks for and `task` lacks, in words; None when all are there."""
        return self._lack(self._fields(task, "", None), task)

    def __call__(self, task: Task, completion: str, token_ids: Sequence[int] | None = None) -> Any:
        """Call the function on one completion. ConfigError when it asks for something that the task lacks."""
        return self._call(self._fields(task, completion, token_ids), task)

    def _fields(self, task: Task, completion: str, token_ids: Sequence[int] | None) -> dict[str, Any]:
        if isinstance(task.prompt, list):
            messages = task.prompt
        else:
            # A function that reads messages works with text prompts, too: a text stands for the turn of a user.
            messages = [{"role": "user", "content": task.prompt}]
        fields = {
            # First, so that a column called `prompt` or `answer` cannot replace the field of the task.
            **task.info,
            "task": task,
            "prompt": task.prompt,
            "messages": messages,
            "answer": task.answer,
            "completion": completion,
            "token_ids": token_ids,
        }
        if self.has_verl_form:
            fields |= {
                "data_source": task.source,
                "solution_str": completion,
                "ground_truth": task.answer,
                "extra_info": dict(task.info),
            }
        return fields


class ByColumns(_Function):
    """A plain function of all completions of a prompt, in TRL's form: `f(prompts, completions, **columns) -> list`."""

    def missing(self, task: Task) -> str | None:
        """Return the fields that the function asks for and `task` lacks, in words; None when all are there."""
        return self._lack(_columns(task, [], []), task)

    def __call__(self, task: Task, completions: Sequence[str], token_ids: Sequence[Sequence[int] | None]) -> Any:
        """Call the function on the completions. ConfigError when it asks for something that the task lacks."""
        return self._call(_columns(task, completions, token_ids), task)


def by_signature(function: Callable[..., Any]) -> ByName | ByColumns:
    """The function ready to be called: in TRL's form when it asks for `prompts` or `completions`."""
    names = {p.name for p in _parameters(function) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if names & _COLUMNS:
        return ByColumns(function)
    return ByName(function)


def sampled_ids(rollout: Rollout | None) -> list[int] | None:
    """The token ids that the policy wrote; None where there is no rollout."""
    if rollout is None:
        return None
    return rollout.token_ids[rollout.sampled].tolist()


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages and columns; a partial has the name of the function that it binds."""
    # A partial has no `__name__`, nor has an object with `__call__`, which is called by its class.
    return getattr(getattr(function, "func", function), "__name__", type(function).__name__)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the signature of {name_of(function)!r} cannot be read: {error}") from error


def score_of(result: Any) -> Any:
    """Return a function's result, or its `score` where the result is a mapping with one, as verl's functions may
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
    # `solution` or `ground_truth` in a task's info is that task's own column and goes before the answer under that
    # name; `answer` is always the answer of the task.
    fields = {**answers, **task.info} | {name: value for name, value in answers.items() if name == "answer"}
    return {
        **{name: [value] * count for name, value in fields.items()},
        "prompts": [task.prompt] * count,
        "completions": [[{"role": "assistant", "content": c}] for c in completions] if chat else list(completions),
        "completion_ids": list(token_ids),
    }
