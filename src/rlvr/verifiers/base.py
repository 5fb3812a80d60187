"""What a verifier is, and how plain functions become one.

A verifier looks at one task and one completion and returns a Verdict. It may be synchronous or asynchronous, and declares
what it needs, so that the pool that runs it can isolate it and hold it to a time limit. Works without torch.

Invariant: `Verifier.verify` may raise, return nonsense or hang; `judged` and the pool turn that into an undecided verdict,
never into an exception of the run.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlvr import registry
from rlvr.calling import ByName
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

    def quick(self, task: Task, completion: str) -> Verdict | None:
        """The verdict where it costs microseconds, else None: then `verify` is called.

        It runs in the caller's thread, without isolation or time limit, so it takes linear time and evaluates nothing.
        """
        return None

    def prepare(self) -> None:
        """Slow imports and models. Called once in each worker process, before the time limit of an answer starts."""
        return

    def check_task(self, task: Task) -> str | None:
        """What is wrong with the task (a gold answer that cannot be parsed, say), or None. Called before training."""
        return None

    def same_answer(self, first: str, second: str) -> bool:
        """Whether two extracted answers are the same (votes, maj@k)."""
        return first.strip() == second.strip()


class FunctionVerifier(Verifier):
    """A plain function as a verifier: it receives by name what its signature asks for (rlvr.calling says which names).

    It returns a number (1 correct, 0 wrong, else partial), a bool, None (undecided) or a Verdict, and may be asynchronous.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.call = ByName(function)
        self.name = self.call.name

    def check_task(self, task: Task) -> str | None:
        return self.call.missing(task)

    def verify(self, task: Task, completion: str, rollout: Rollout | None = None) -> Verdict | Awaitable[Verdict]:
        result = self.call(task, completion, rollout)
        return self._awaited(result) if inspect.isawaitable(result) else as_verdict(result, self.name)

    async def _awaited(self, result: Awaitable[Any]) -> Verdict:
        return as_verdict(await result, self.name)


def as_verdict(result: Any, name: str) -> Verdict:
    """What a verifier or a plain function returned, as a Verdict; nonsense becomes an undecided verdict that says so."""
    if isinstance(result, Verdict):
        return result
    if result is None or isinstance(result, (bool, int, float)):
        return Verdict.from_score(result)
    try:
        if isinstance(result, (str, bytes)):
            raise TypeError("a text is no score, even when it reads like one")
        return Verdict.from_score(float(result))
    except (TypeError, ValueError):
        return Verdict.undecided(f"{name} returned {type(result).__name__}, not a number, None or a Verdict")


Caller = Callable[[Callable[[], Any]], Awaitable[Any]]
"""How the synchronous part of a verification is run: on a thread, say."""


async def judged(
    verifier: Verifier, task: Task, completion: str, rollout: Rollout | None = None, call: Caller | None = None
) -> Verdict:
    """The verdict of `verifier`, with the seconds it took; whatever it raises is an undecided verdict.

    `call` runs the synchronous part elsewhere; by default it runs here.
    """
    start, name = time.perf_counter(), getattr(verifier, "name", type(verifier).__name__)

    def verify() -> Any:
        if isinstance(verifier, FunctionVerifier):
            return verifier.verify(task, completion, rollout)
        return verifier.verify(task, completion)

    try:
        result = verify() if call is None else await call(verify)
        if inspect.isawaitable(result):
            result = await result
        verdict = as_verdict(result, name)
    except (
        Exception,
        SystemExit,
    ) as error:  # the verifier is the user's code: its trouble costs a verdict, not the run
        verdict = Verdict.undecided(f"{name} raised {type(error).__name__}: {error}")
    return verdict if verdict.seconds else replace(verdict, seconds=time.perf_counter() - start)


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
