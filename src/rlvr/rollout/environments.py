"""Tools and environments: what answers a turn of the policy's.

A tool is a function `f(text, task)` of the turn's text; an environment that remembers is a class whose `begin(task)`
gives an episode with `reply(text)` and, if it wants, `close()`. Both answer with text, or with None when the rollout is
over, and all of these may be coroutine functions. Invariants: what they raise, and a call past the time limit, costs
one reply, which then says `error: ...`, never the run; an episode that was begun is closed, also when its rollout is
given up; a call that hangs costs a daemon thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlvr import registry
from rlvr.components import Environment, Episode, Tool
from rlvr.core.specs import ComponentSpec, SpecLike
from rlvr.records import Task
from rlvr.registry import register
from rlvr.verifiers.base import is_coroutine
from rlvr.verifiers.pool.threads import Threads
from rlvr.verifiers.puzzles.expressions import read_expression

_log = logging.getLogger(__name__)
MOST_OF_AN_ERROR = 200
"""Characters of an exception's message that the policy reads."""


class EnvironmentCalls:
    """A registered environment, ready to be talked to by many rollouts at once.

    Coroutine functions run on the loop of the rollouts and must not block it; others run on a thread of each call.
    """

    def __init__(self, spec: SpecLike, time_limit: float) -> None:
        self.name = ComponentSpec.parse(spec).name
        self._environment: Environment | Tool = registry.build("environment", spec)
        self._time_limit = time_limit
        self._threads = Threads("environment-call")
        self._warned: set[str] = set()

    def episode(self, task: Task) -> EpisodeCalls:
        """One rollout's talk about `task`; close it."""
        return EpisodeCalls(self, self._environment, task)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
        """(result, None), or (None, in words what went wrong)."""
        try:
            async with asyncio.timeout(self._time_limit) as limit:
                if is_coroutine(function):
                    result = function(*arguments)
                else:
                    result = await self._threads.call(lambda: function(*arguments))
                return (await result if inspect.isawaitable(result) else result), None
        except Exception as error:  # someone else's code may raise anything, and its trouble is the policy's to read
            late = isinstance(error, TimeoutError) and limit.expired()
            text = f"no answer within {self._time_limit:g} s" if late else _said(error)
            self.warn(text, None if late else error)
            return None, text

    def warn(self, text: str, error: Exception | None = None) -> None:
        """Say in the log that something went wrong, once for each kind of trouble."""
        kind = type(error).__name__ if error else text
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("environment %r: %s (said once)", self.name, text, exc_info=error)


@runtime_checkable
class Closable(Protocol):
    """An episode that holds something. A user's episode need not be a subclass of `rlvr.components.Episode`."""

    def close(self) -> Any:
        """Give back what is held."""


@runtime_checkable
class Replying(Protocol):
    """An episode that can be talked with."""

    def reply(self, text: str) -> Any:
        """See `rlvr.components.Episode`."""


class EpisodeCalls:
    """One rollout's talk with an environment."""

    def __init__(self, calls: EnvironmentCalls, environment: Environment | Tool, task: Task) -> None:
        self._calls = calls
        self._environment = environment
        self._task = task
        self._state: Any = None
        self._lost: str | None = None

    async def reply(self, text: str) -> str | None:
        """Return what the environment answers to a turn, `error: ...` for its own trouble; None when the rollout is
        over.

        An environment that remembers is begun with the first turn. After a call past the time limit or an error in
        `begin` it is not called again, since nobody knows what it did: every further reply is the same error.
        """
        environment = self._environment
        remembers = isinstance(environment, Environment)
        if isinstance(environment, Environment) and self._state is None and self._lost is None:
            self._state, self._lost = await self._calls.call(environment.begin, self._task)
            if self._lost is None and not isinstance(self._state, Replying):
                self._lost = f"the {type(self._state).__name__} that `begin` returned has no method `reply`"
                self._calls.warn(self._lost)
        if self._lost is not None:
            return f"error: {self._lost}"
        arguments = (self._state.reply, text) if remembers else (environment, text, self._task)
        result, trouble = await self._calls.call(*arguments)
        if trouble is None and not isinstance(result, str | None):
            trouble = f"the reply is a {type(result).__name__}, not text"
            self._calls.warn(trouble)
        if remembers and trouble is not None and trouble.startswith("no answer"):
            self._lost = trouble
        if trouble is None:
            return result
        return f"error: {trouble}"

    async def close(self) -> None:
        """End what was begun."""
        state = self._state
        self._state = None
        if isinstance(state, Closable):
            await self._calls.call(state.close)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_OF_AN_ERROR]


@register("environment", "calculator")
async def calculator(text: str, task: Task, *, opening: str = "[", closing: str = "]") -> str | None:
    """The exact value of the last expression in brackets, `[12*(3+4)]`; the rollout is over when a turn has none."""
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    if start < 0:
        return None
    expression = read_expression(text[start + len(opening) : end])
    if isinstance(expression, str):
        return f"error: {expression}"
    return str(expression.value)


@register("environment", "script")
@dataclass
class Script(Environment):
    """Replies written beforehand, one after each turn; after the last one's turn the rollout is over.

    Self-correction (SCoRe, Kumar et al. 2024, arXiv 2409.12917) has one that asks for a second attempt. `{prompt}` in a
    reply is the task's prompt where that is text.
    """

    replies: tuple[str, ...]
    """What is said after the first turn, the second ..."""

    def __post_init__(self) -> None:
        if not self.replies:
            raise ValueError("it needs at least one reply")

    async def begin(self, task: Task) -> ScriptEpisode:
        """A talk that has said nothing."""
        prompt = task.prompt if isinstance(task.prompt, str) else ""
        return ScriptEpisode(reply.replace("{prompt}", prompt) for reply in self.replies)


@dataclass
class ScriptEpisode(Episode):
    """A script as it is read out."""

    left: Iterator[str]

    async def reply(self, text: str) -> str | None:
        """The next line, whatever was said."""
        return next(self.left, None)
