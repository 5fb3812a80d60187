"""The base class of verifiers, and plain functions as verifiers.

A verifier looks at one task and one completion and returns a Verdict. It may be synchronous or asynchronous, and
declares what it needs, so that the pool that runs it can isolate it and hold it to a time limit. Works without torch.

Invariant: `Verifier.verify` may raise, return nonsense or hang; `judged` and the pool turn that into an undecided
verdict, never into an exception of the run.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from rlvr import registry
from rlvr.core.calling import ByColumns, ByName, by_signature, score_of
from rlvr.core.component import CONTRACTS, Component, declared
from rlvr.core.specs import ComponentSpec
from rlvr.errors import USER_CODE_ERRORS, ConfigError
from rlvr.records import Task, Verdict

if TYPE_CHECKING:
    from rlvr.verifiers.run_models import RunModels

_CONSTANT = (*(bool, int, float, str, bytes, re.Pattern, Enum, PurePath, type), ModuleType, BuiltinFunctionType)


@dataclass(frozen=True)
class Needs:
    """Isolation that a verifier needs to run safely."""

    process: bool = False
    """It computes long enough, or may hang or crash, so it runs in a worker process that can be killed."""
    remote: bool = False
    """It waits for a service elsewhere: many run at once, and a verdict that comes too late is nobody's answer's
    fault."""
    sandbox: bool = False
    """It runs code that a model wrote: its worker process has no network, no environment, and no files to write."""


class Verifier(Component):
    """Checks answers. Subclass it and write `verify`; everything else has a default.

        class Even(Verifier):
            def verify(self, task, completion):
                return Verdict.from_score(completion.strip().endswith(tuple("02468")))

    Options are the parameters of `__init__` (or the fields of a dataclass) and come from the configuration by name.

    A verifier that compares the answers of a group defines `verify_group` besides. One that is made of other verifiers
    defines `async compose(task, completion, verify)`, where `await verify(part)` is the verdict of a part under the
    part's own isolation and time limit; a pool then calls it instead of `verify`.
    """

    needs: ClassVar[Needs] = Needs()
    time_limit: float = 10.0
    """Seconds of wall clock for one call; past it the verdict is `timeout`."""
    verify_group: ClassVar[Callable[..., Any] | None] = None
    """`verify_group(task, completions) -> list[Verdict]`, sync or async, one per completion and in their order; or
    None. Where there is one, a group is verified in one call, when all its completions are sampled."""
    compose: ClassVar[Callable[..., Any] | None] = None
    """`compose(task, completion, verify)`, a coroutine function of a verifier that is made of others; or None."""
    compose_group: ClassVar[Callable[..., Any] | None] = None
    """`compose_group(task, completions, verify)`, the same for a group, where `await verify(part, members)` is the list
    of a part's verdicts on the completions at these positions; or None. It goes with `verify_group`."""
    metrics: ClassVar[Callable[..., dict[str, float]] | None] = None
    """`metrics()`, counts since the last call, for the metrics `verifier/NAME/COUNT` of a step; or None. Called on rank
    0, on the trainer's thread; a copy in a worker process is not asked."""

    @declared
    def name(self) -> str:
        """The verifier in messages and columns."""
        return type(self).__name__

    @declared
    def gives_spans(self) -> bool | None:
        """True where verdicts have `Verdict.spans`; None where that is not known before they are given. The advantage
        `spans` and the term `verdict_spans` refuse a verifier that says False."""
        return False

    @abstractmethod
    def verify(self, task: Task, completion: str) -> Verdict | Awaitable[Verdict]:
        """The verdict on `completion`, the decoded text that the policy wrote, as an answer to `task`."""

    def quick(self, task: Task, completion: str) -> Verdict | None:
        """The verdict where it costs microseconds, else None: then `verify` is called.

        It runs in the caller's thread, without isolation or time limit, so it takes linear time and evaluates nothing.
        """
        return None

    def cache_key(self, task: Task, completion: str) -> Hashable | None:
        """Return the value that determines the verdict, such as (gold, extracted answer); None (the default): the
        verdict is not cached.

        Asked for after `quick`, in the caller's thread, so it takes linear time and evaluates nothing.
        """
        return None

    def prepare(self) -> None:
        """Slow imports and models. Called once before worker processes are forked, and before any time limit starts."""
        return

    def attach(self, models: RunModels) -> None:
        """Take what the verifier asks of the run's models: called once before training, on rank 0. ConfigError where a
        model is not there or does not fit."""
        return

    def check_task(self, task: Task) -> str | None:
        """Return the reason why the task cannot be checked (a gold answer that cannot be parsed, say), or None. Called
        before training."""
        return None

    def judge_of(self, task: Task) -> Verifier:
        """The verifier that judges `task`: this one, or the part that a combination routes the task to."""
        return self

    def same_answer(self, first: str, second: str) -> bool:
        """Return True if two extracted answers are the same (votes, maj@k)."""
        return first.strip() == second.strip()


CONTRACTS["verifier"] = (Verifier,)


@runtime_checkable
class DeclaresNeeds(Protocol):
    """A user's function with the attribute `needs`."""

    needs: Needs


class FunctionVerifier(Verifier):
    """A plain function as a verifier: it receives by name what its signature asks for (rlvr.core.calling says which
    names).

    It returns a number (1 correct, 0 wrong, else partial), a bool, None (undecided), a mapping with one of these as
    `score` (whose other numbers are named scores) or a Verdict, and may be asynchronous. It may be a `compute_score` of
    verl. A function that asks for `completions` has TRL's form: it is called once for a group and returns a list of
    these.

    A function runs in several worker processes. One that may hold state (a variable of an enclosing function that is no
    constant, an object that is called) runs on a thread of the trainer's process instead, where its list is appended to
    and its reward model is on the GPU; a global variable of a function in a worker is that process's own. The attribute
    `needs` of the function decides otherwise: `f.needs = Needs(process=True)`. An asynchronous one runs in the
    trainer's process.
    """

    name: str
    # It may return a Verdict with spans.
    gives_spans = None  # type: ignore[assignment]

    def __init__(self, function: Callable[..., Any]) -> None:
        self.call = by_signature(function)
        self.name = self.call.name
        usual = Needs(remote=True) if is_coroutine(function) else Needs(process=not _may_hold_state(function))
        self.needs = function.needs if isinstance(function, DeclaresNeeds) else usual  # type: ignore[misc]

    @property
    def verify_group(self) -> Callable[..., Any] | None:  # type: ignore[override]
        """The verdicts on a group in one call, where the function has TRL's form."""
        if isinstance(self.call, ByColumns):
            return self._verify_group
        return None

    def check_task(self, task: Task) -> str | None:
        return self.call.missing(task)

    def verify(
        self, task: Task, completion: str, token_ids: Sequence[int] | None = None
    ) -> Verdict | Awaitable[Verdict]:
        if isinstance(self.call, ByName):
            result = self.call(task, completion, token_ids)
            if inspect.isawaitable(result):
                return self._awaited(result)
            return as_verdict(result, self.name)
        alone = self._verify_group(task, [completion], [token_ids])
        if inspect.isawaitable(alone):
            return self._awaited(alone, first=True)
        return as_verdicts(alone, self.name, 1)[0]

    def _verify_group(
        self, task: Task, completions: Sequence[str], token_ids: Sequence[Sequence[int] | None] | None = None
    ) -> Any:
        assert isinstance(self.call, ByColumns)
        return self.call(task, completions, token_ids or [None] * len(completions))

    async def _awaited(self, result: Awaitable[Any], first: bool = False) -> Verdict:
        value = await result
        if first:
            return as_verdicts(value, self.name, 1)[0]
        return as_verdict(value, self.name)


def is_coroutine(function: Any) -> bool:
    """Return True if a function, a partial or an object with `__call__` is asynchronous."""
    function = inspect.unwrap(function)
    function = getattr(function, "func", function)
    called = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _may_hold_state(value: Any, within: frozenset[int] = frozenset()) -> bool:
    """Return True if a callable may hold state that a copy of it in another process would not share."""
    # The ids of the callers end the recursion of a function that refers to itself.
    if value is None or isinstance(value, _CONSTANT) or id(value) in within:
        return False
    parts: Sequence[Any]
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        try:
            parts = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # a variable that is assigned later may be anything
            return True
    elif isinstance(value, (tuple, frozenset)):
        parts = tuple(value)
    else:
        return True
    return any(_may_hold_state(part, within | {id(value)}) for part in parts)


def display_name(verifier: Verifier) -> str:
    """Return the name of a verifier in messages and columns."""
    return verifier.name


def as_verdict(result: Any, name: str) -> Verdict:
    """Return the result of a verifier or a plain function as a Verdict; any other type becomes an undecided verdict
    that names it."""
    if isinstance(result, Verdict):
        return result
    more = _named_values(result)
    result = score_of(result)
    if result is None or isinstance(result, (bool, int, float)):
        return Verdict.from_score(result, **more)
    try:
        # float("1e3") would succeed: a verifier that returns text is a mistake, not a score.
        if isinstance(result, (str, bytes)):
            raise TypeError("a text is no score, even when it reads like one")
        return Verdict.from_score(float(result), **more)
    except (TypeError, ValueError):
        return _nonsense(f"{name} returned {type(result).__name__}, not a number, None or a Verdict")


def _named_values(result: Any) -> dict[str, Any]:
    """The other values of a mapping with a `score`: finite numbers are named scores, a text under `pred` is the answer.

    verl keeps them as reward_extra_info and votes by `pred` (verl/trainer/ppo/metric_utils.py).
    """
    if not isinstance(result, Mapping) or "score" not in result:
        return {}
    numbers = {
        str(name): float(value)
        for name, value in result.items()
        if name != "score" and isinstance(value, (bool, int, float)) and math.isfinite(value)
    }
    answer = result.get("pred")
    return {"scores": numbers, "answer": answer if isinstance(answer, str) else None}


def as_verdicts(result: Any, name: str, count: int) -> list[Verdict]:
    """Return the result of a verifier for `count` completions as verdicts; anything but a list of that length leaves
    all undecided."""
    try:
        if isinstance(result, (str, bytes, Mapping)):
            raise TypeError
        results = list(result)
    except TypeError:
        return [_nonsense(f"{name} returned {type(result).__name__}, not a list of {count} verdicts")] * count
    if len(results) != count:
        return [_nonsense(f"{name} returned {len(results)} verdicts for {count} completions")] * count
    return [as_verdict(one, name) for one in results]


def _nonsense(reason: str) -> Verdict:
    return Verdict.undecided(reason, traceback=reason)


Caller = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs the synchronous part of a verification, on a thread for example."""


async def judged(
    verifier: Verifier,
    task: Task,
    completion: str,
    token_ids: Sequence[int] | None = None,
    call: Caller | None = None,
) -> Verdict:
    """The verdict of `verifier`, with the seconds it took; whatever it raises is an undecided verdict.

    `call` runs the synchronous part elsewhere; by default it runs here.
    """
    more = (token_ids,) if isinstance(verifier, FunctionVerifier) else ()
    start = time.perf_counter()
    name = display_name(verifier)
    try:
        verdict = as_verdict(await _result(functools.partial(verifier.verify, task, completion, *more), call), name)
    except USER_CODE_ERRORS as error:  # the verifier is the user's code: its trouble costs a verdict, not the run
        verdict = Verdict.raised(f"{name} raised", error)
    return timed(verdict, start)


async def judged_group(
    verifier: Verifier,
    task: Task,
    completions: Sequence[str],
    token_ids: Sequence[Sequence[int] | None] | None = None,
    call: Caller | None = None,
) -> list[Verdict]:
    """The verdicts of a verifier with `verify_group`, as `judged` gives one."""
    more = (token_ids,) if isinstance(verifier, FunctionVerifier) else ()
    start = time.perf_counter()
    name = display_name(verifier)
    count = len(completions)
    try:
        assert verifier.verify_group is not None
        result = await _result(functools.partial(verifier.verify_group, task, list(completions), *more), call)
        verdicts = as_verdicts(result, name, count)
    except USER_CODE_ERRORS as error:
        verdicts = [Verdict.raised(f"{name} raised", error)] * count
    return [timed(verdict, start) for verdict in verdicts]


async def _result(verify: Callable[[], Any], call: Caller | None) -> Any:
    result = verify() if call is None else await call(verify)
    if inspect.isawaitable(result):
        return await result
    return result


def timed(verdict: Verdict, start: float) -> Verdict:
    """The verdict with the seconds since `start`, unless it says its own."""
    if verdict.seconds:
        return verdict
    return replace(verdict, seconds=time.perf_counter() - start)


def as_verifier(piece: Any) -> Verifier:
    """A Verifier from what a user may give: a Verifier, a Verifier class, a plain function, or a component as
    written."""
    if isinstance(piece, (str, dict, ComponentSpec)):
        piece = registry.build("verifier", piece)
    if isinstance(piece, type) and issubclass(piece, Verifier):
        piece = registry.instance("verifier", piece.__name__, piece, {})
    if isinstance(piece, Verifier):
        return piece
    if callable(piece):
        return FunctionVerifier(piece)
    raise ConfigError(
        f"a verifier is a Verifier, a function or a name, not {type(piece).__name__}: make the class a subclass of "
        "rlvr.Verifier"
    )
