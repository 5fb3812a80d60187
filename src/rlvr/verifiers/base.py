"""What a verifier is, and how plain functions become one.

A verifier looks at one task and one completion and returns a Verdict. It may be synchronous or asynchronous, and declares
what it needs, so that the pool that runs it can isolate it and hold it to a time limit. Works without torch.

Invariant: `Verifier.verify` may raise, return nonsense or hang; `judged` and the pool turn that into an undecided verdict,
never into an exception of the run.
"""

from __future__ import annotations

import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.records import Rollout, Task, Verdict


@dataclass(frozen=True)
class Needs:
    """What a verifier needs to run safely."""

    process: bool = False
    """It computes long enough, or may hang or crash, so it runs in a worker process that can be killed."""
    remote: bool = False
    """It waits for a service elsewhere."""


class Verifier(ABC):
    """Checks answers. Subclass it and write `verify`; everything else has a default.

        class Even(Verifier):
            def verify(self, task, completion):
                return Verdict.from_score(completion.strip()[-1:] in "02468")

    Options are the parameters of `__init__` (or the fields of a dataclass) and come from the configuration by name.
    """

    needs: ClassVar[Needs] = Needs()
    time_limit: float = 10.0
    """Seconds of wall clock for one completion; past it the verdict is `timeout`."""

    @abstractmethod
    def verify(self, task: Task, completion: str) -> Verdict | Awaitable[Verdict]:
        """The verdict on `completion`, the decoded text that the policy wrote, as an answer to `task`."""

    def check_task(self, task: Task) -> str | None:
        """What is wrong with the task (a gold answer that cannot be parsed, say), or None. Called before training."""
        return None

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two extracted answers are the same (votes, maj@k)."""
        return first.strip() == second.strip()


class FunctionVerifier(Verifier):
    """A plain function as a verifier: it receives by name what its signature asks for.

    Names: prompt, completion, answer, task, messages, token_ids, and any field of the task's info. A function with
    `**kwargs` receives everything. It returns a number (1 correct, 0 wrong, else partial), a bool, None (undecided) or a
    Verdict, and may be asynchronous.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.argument_names = _argument_names(function, self.name)

    async def verify(self, task: Task, completion: str, rollout: Rollout | None = None) -> Verdict:
        result = self.function(**self.arguments(task, completion, rollout))
        if inspect.isawaitable(result):
            result = await result
        return as_verdict(result, self.name)

    def arguments(self, task: Task, completion: str, rollout: Rollout | None = None) -> dict[str, Any]:
        """The keyword arguments of the function for this completion. KeyError-free: ConfigError names what is missing."""
        known: dict[str, Any] = {
            **task.info,
            "task": task,
            "prompt": task.prompt,
            "messages": task.prompt if isinstance(task.prompt, list) else [{"role": "user", "content": task.prompt}],
            "answer": task.answer,
            "completion": completion,
            "token_ids": None if rollout is None else rollout.token_ids[rollout.sampled].tolist(),
        }
        required, optional, takes_all = self.argument_names
        missing = [name for name in required if name not in known]
        if missing:
            raise ConfigError(
                f"the function {self.name!r} asks for {missing[0]!r}, which task {task.id!r} has neither as a field nor in its info"
            )
        return known if takes_all else {name: known[name] for name in [*required, *optional] if name in known}


def _argument_names(function: Callable[..., Any], name: str) -> tuple[list[str], list[str], bool]:
    """(required, optional, takes everything) parameters of a reward function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the signature of {name!r} cannot be read: {error}") from error
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ConfigError(f"the function {name!r} has positional-only parameters; it is called by name")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    return required, [p.name for p in named if p.default is not p.empty], any(p.kind is p.VAR_KEYWORD for p in parameters)


def as_verdict(result: Any, name: str) -> Verdict:
    """What a verifier or a plain function returned, as a Verdict; nonsense becomes an undecided verdict that says so."""
    if isinstance(result, Verdict):
        return result
    if result is None or isinstance(result, (bool, int, float)):
        return Verdict.from_score(result)
    try:
        return Verdict.from_score(float(result))
    except (TypeError, ValueError):
        return Verdict.undecided(f"{name} returned {type(result).__name__}, not a number, None or a Verdict")


async def judged(verifier: Verifier, task: Task, completion: str, rollout: Rollout | None = None) -> Verdict:
    """The verdict of `verifier`, with the seconds it took; whatever it raises is an undecided verdict."""
    start, name = time.perf_counter(), getattr(verifier, "name", type(verifier).__name__)
    try:
        if isinstance(verifier, FunctionVerifier):
            result: Any = await verifier.verify(task, completion, rollout)
        else:
            result = verifier.verify(task, completion)
            if inspect.isawaitable(result):
                result = await result
        verdict = as_verdict(result, name)
    except Exception as error:  # the verifier is the user's code: its trouble costs a verdict, not the run
        verdict = Verdict.undecided(f"{name} raised {type(error).__name__}: {error}")
    spent = time.perf_counter() - start
    return verdict if verdict.seconds or not math.isfinite(spent) else _with_seconds(verdict, spent)


def _with_seconds(verdict: Verdict, seconds: float) -> Verdict:
    object.__setattr__(verdict, "seconds", seconds)
    return verdict


def as_verifier(piece: Any) -> Verifier:
    """A Verifier from what a user may give: a Verifier, a Verifier class, a plain function, or a piece as written."""
    if isinstance(piece, (str, dict)):
        piece = registry.build("verifier", piece)
    if isinstance(piece, type) and issubclass(piece, Verifier):
        piece = piece()
    if isinstance(piece, Verifier):
        return piece
    if callable(piece):
        return FunctionVerifier(piece)
    raise ConfigError(f"a verifier is a Verifier, a function or a name, not {type(piece).__name__}")
