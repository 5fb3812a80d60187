"""Tools and environments, which answer the turns of the policy.

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
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlvr import registry
from rlvr.components import Environment, Episode, Tool
from rlvr.core.process.deadline import Deadline
from rlvr.core.specs import ComponentSpec, SpecLike
from rlvr.records import Task
from rlvr.registry import register
from rlvr.verifiers.base import is_coroutine
from rlvr.verifiers.pool.threads import Threads
from rlvr.verifiers.puzzles.expressions import read_expression

_log = logging.getLogger(__name__)
# Arbitrary: some 50 tokens. A traceback of thousands would use up the policy's budget and its context.
MOST_OF_AN_ERROR = 200
"""Characters of an exception's message that the policy reads."""


class EnvironmentCalls:
    """A registered environment, ready to serve many rollouts at once.

    Coroutine functions run on the loop of the rollouts and must not block it; others run on a thread of each call.
    """

    def __init__(self, spec: SpecLike, time_limit: float) -> None:
        self.name = ComponentSpec.parse(spec).name
        self._environment: Environment | Tool = registry.build("environment", spec)
        self._time_limit = time_limit
        self._threads = Threads("environment-call")
        self._warned: set[str] = set()
        self._closing: set[asyncio.Task[Any]] = set()

    def episode(self, task: Task) -> EpisodeCalls:
        """The conversation of one rollout about `task`; close it."""
        return EpisodeCalls(self, self._environment, task)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
        """(result, None), or (None, the error in words)."""
        # A call that finished while this loop was held up is not late.
        limit = Deadline(self._time_limit)
        try:
            # The deadline cancels a coroutine. A plain function cannot be interrupted: its thread, a daemon, is left
            # behind.
            async with limit:
                if is_coroutine(function):
                    result = function(*arguments)
                else:
                    result = await self._threads.call(lambda: function(*arguments))
                # A plain function may return an awaitable too (a lambda around a coroutine function, say).
                return (await result if inspect.isawaitable(result) else result), None
        except Exception as error:  # a user's code may raise anything, and the policy reads the error
            # The environment's own code may raise TimeoutError (of a socket): only ours is a call past the limit.
            late = isinstance(error, TimeoutError) and limit.expired()
            if late:
                text = f"no answer within {self._time_limit:g} s"
            else:
                text = f"{type(error).__name__}: {error}"[:MOST_OF_AN_ERROR]
            self.warn(text, None if late else error)
            return None, text

    async def call_whatever_happens(self, function: Callable[..., Any]) -> None:
        """Call a function to its end, also where who waits for it is cancelled meanwhile."""
        # The loop itself holds tasks weakly.
        task = asyncio.ensure_future(self.call(function))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await asyncio.shield(task)

    def warn(self, text: str, error: Exception | None = None) -> None:
        """Log an error, once for each kind."""
        kind = type(error).__name__ if error else text
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("environment %r: %s (logged once)", self.name, text, exc_info=error)


@runtime_checkable
class Closable(Protocol):
    """An episode that holds something. A user's episode need not be a subclass of `rlvr.components.Episode`."""

    def close(self) -> Any:
        """Give back what is held."""


@runtime_checkable
class Replying(Protocol):
    """An episode that replies to turns."""

    def reply(self, text: str) -> Any:
        """See `rlvr.components.Episode`."""


class EpisodeCalls:
    """The conversation of one rollout with an environment."""

    def __init__(self, calls: EnvironmentCalls, environment: Environment | Tool, task: Task) -> None:
        self._calls = calls
        self._environment = environment
        self._task = task
        self._state: Any = None
        self._lost: str | None = None
        # `_state` and `_over` change together: a thread may still be in `begin` when the rollout is given up.
        self._lock = threading.Lock()
        self._over = False

    async def reply(self, text: str) -> str | None:
        """Return the environment's answer to a turn, `error: ...` where it fails; None when the rollout is over.

        An environment that remembers is begun with the first turn. After a call past the time limit or an error in
        `begin` it is not called again, since its state is unknown: every further reply is the same error.
        """
        environment = self._environment
        remembers = isinstance(environment, Environment)
        # Begun at the first reply, so that no container is held while the policy writes its first turn.
        if isinstance(environment, Environment) and self._state is None and self._lost is None:
            begin = environment.begin if is_coroutine(environment.begin) else self._begin_on_thread
            state, self._lost = await self._calls.call(begin, self._task)
            if self._lost is None:
                self._state = state
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
        # Only a call past the limit ends an episode: its thread may still change the state. One that raised has
        # returned.
        if remembers and trouble is not None and trouble.startswith("no answer"):
            self._lost = trouble
        if trouble is None:
            return result
        return f"error: {trouble}"

    def _begin_on_thread(self, task: Task) -> Any:
        """Begin on the thread of the call, which nothing interrupts; close what was begun for a rollout that has been
        given up meanwhile."""
        assert isinstance(self._environment, Environment)
        state = self._environment.begin(task)
        with self._lock:
            if not self._over:
                self._state = state
                return state
        if isinstance(state, Closable):
            asyncio.run(self._calls.call(state.close))
        return state

    async def close(self) -> None:
        """End what was begun."""
        # Cleared before the call: a second `close` (of a rollout that is given up while it closes) does nothing.
        with self._lock:
            state = self._state
            self._state = None
            self._over = True
        if isinstance(state, Closable):
            # A rollout that is given up may be cancelled a second time, by its group and by the collector.
            await self._calls.call_whatever_happens(state.close)


@register("environment", "calculator")
async def calculator(text: str, task: Task, *, opening: str = "[", closing: str = "]") -> str | None:
    """The exact value of the last expression in brackets, `[12*(3+4)]`; the rollout is over when a turn has none."""
    # The last closing bracket and the last opening one before it: "so [12*34] is" gives "12*34"; a turn such as "no
    # call", "]2[" or "[2+3" ends the rollout.
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
    """The reply after the first turn, the second ..."""

    def __post_init__(self) -> None:
        if not self.replies:
            raise ValueError("it needs at least one reply")

    async def begin(self, task: Task) -> ScriptEpisode:
        """An episode at the first reply."""
        # A chat prompt is a list of messages and has no single text to quote.
        prompt = task.prompt if isinstance(task.prompt, str) else ""
        return ScriptEpisode(reply.replace("{prompt}", prompt) for reply in self.replies)


@dataclass
class ScriptEpisode(Episode):
    """The replies of a script that are still to come."""

    replies: Iterator[str]

    async def reply(self, text: str) -> str | None:
        """The next reply, whatever the turn was."""
        return next(self.replies, None)
