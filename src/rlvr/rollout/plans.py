"""Plans make the rollouts of a group, with a `RolloutContext`: the engine, the verifier and the prompts of a step.

A plan owns groups. It is an asynchronous generator over one draw of a task that yields verified rollouts as they
finish; it may ask for any number of generations, verdicts and further rollouts. It names its groups by the draw's
number, further ones `NUMBER/...`. The context counts what plans ask it for.

Invariant: counts only grow, so that readers take differences and reset nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from rlvr import registry
from rlvr.core.component import CONTRACTS, Component, declared
from rlvr.core.seeding import seed_of
from rlvr.core.specs import SpecLike
from rlvr.data import Draw, Prompts
from rlvr.records import BASELINE, Origin, Rollout, Segment, StopReason, Task, VerdictStatus
from rlvr.registry import register
from rlvr.rollout.engine import Completion, Engine, Request, Sampling
from rlvr.verifiers.pool import Verification


class IdleClock:
    """An engine's idle seconds, in which no request is open, by phase of a step. Requests are counted from any thread:
    `with clock.request(): ...` around each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._idle = 0.0
        self._since = time.perf_counter()
        self.seconds: dict[str | None, float] = {}
        """By phase; None: in none of them."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from being made to being answered."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def start(self) -> None:
        """Begin a step."""
        self.seconds.clear()
        self._take()

    def settle(self, phase: str | None) -> None:
        """Give the idle seconds since the last call to a phase, or to none."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._take()

    def _take(self) -> float:
        """Idle seconds since the last call."""
        self._change(0)
        with self._lock:
            idle = self._idle
            self._idle = 0.0
            return idle

    # The lock is held because requests are counted on the collector's loop while the trainer's thread takes the sum at
    # the end of a phase.
    def _change(self, by: int) -> None:
        with self._lock:
            now = time.perf_counter()
            # The time since the last change was idle where nothing was open during it.
            if not self._open:
                self._idle += now - self._since
            self._open += by
            self._since = now


class Activity:
    """Completions and verdicts, asked for and done, and the engine's idle time. One thread counts, any may read."""

    def __init__(self) -> None:
        self.idle = IdleClock()
        self.asked = {"sampling": 0, "verifying": 0}
        self.done = {"sampling": 0, "verifying": 0}

    def counts(self) -> dict[str, tuple[int, int]]:
        """`sampling` and `verifying` -> (done, asked for) since the run began."""
        return {name: (self.done[name], asked) for name, asked in self.asked.items()}

    @contextmanager
    def counted(self, name: str, count: int = 1) -> Iterator[None]:
        """`count` of them, asked for now, and done at the end of the block, however it ends."""
        # Only counted up, and in one thread: a reader in another one takes differences and needs no lock.
        self.asked[name] += count
        try:
            yield
        finally:
            self.done[name] += count


@dataclass
class RolloutContext:
    """The interface of a plan to the run in one step. Its methods count their calls in `activity`."""

    engine: Engine
    verification: Verification
    prompts: Prompts
    sampling: Sampling
    group_size: int
    context: int
    """Most tokens of a rollout, prompt included."""
    history: Any
    """Per-prompt history: `history[task id]`. It has a best answer where the plan, a class, has `answer_characters`
    above 0."""
    seed_path: tuple[int | str, ...] = ()
    """Beginning of the path of each seed, so that no seed depends on the order of events (N7)."""
    activity: Activity = field(default_factory=Activity)
    sampled_at: float = field(default_factory=time.perf_counter, init=False)
    """When the last completion was sampled, by time.perf_counter."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion."""
        # Both are left by a cancelled request too, so that an interrupted collection does not count as open for ever.
        with self.activity.counted("sampling"), self.activity.idle.request():
            completion = await self.engine.generate(request)
        self.sampled_at = time.perf_counter()
        return completion

    async def verify(self, rollout: Rollout) -> Rollout:
        """The rollout with its verdicts; an error of the verifier is a verdict and is not raised."""
        with self.activity.counted("verifying"):
            return await self.verification.verify(rollout)

    async def verify_group(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts of one task with their verdicts, judged together."""
        with self.activity.counted("verifying", len(rollouts)):
            return await self.verification.verify_group(rollouts)

    def by_group(self, task: Task) -> bool:
        """Return True if the verifier of a task wants a group together (`verify` then judges a rollout as a group of
        one)."""
        return self.verification.by_group(task)

    def same_answer(self, task: Task, first: str, second: str) -> bool:
        """Return True if two extracted answers to a task are the same, as its verifier sees it."""
        return self.verification.same_answer(task, first, second)

    def encode(self, task: Task) -> tuple[int, ...]:
        """The token ids of a task's prompt."""
        return self.prompts(task)

    def reply(self, task: Task, text: str, role: str, end: int | None) -> tuple[int, ...]:
        """The token ids that put a text, said by `role`, into the context after a turn of the policy's. `end` is the
        end token that the policy sampled, or None."""
        return self.prompts.reply(task, text, role, end)

    def seed(self, draw: int, member: int, call: int) -> int:
        """The seed of a call of a member's, 63 bits."""
        return seed_of(*self.seed_path, draw, member, call)


# The dtypes of docs/shapes.md. int8 holds the origins; -1 in policy_version needs a signed type.
_COLUMNS = {"token_ids": np.int64, "origin": np.int8, "behaviour_logprobs": np.float32, "policy_version": np.int32}

Plan = Callable[[Draw, RolloutContext], AsyncIterator[Rollout]]


class RolloutPlan(Component):
    """The way from a draw of a task to a group of verified rollouts."""

    @declared
    def independent(self) -> bool:
        """True where the plan makes `group_size` independent rollouts of every draw, so that evaluation may sample with
        it."""
        return False

    @declared
    def one_group(self) -> bool:
        """True where a draw never makes more than one group."""
        return self.independent

    @declared
    def turns(self) -> int | None:
        """Most turns of the policy in a rollout; None where the plan does not say."""
        return None

    @declared
    def sources(self) -> tuple[str, ...]:
        """Sources of the tasks that the plan makes, which `rewards` may name. Such tasks leave no history; the plan
        gives their rollouts a role of its own, whose metrics are `role/ROLE/...`, and names their groups
        `DRAW/...`."""
        return ()

    @declared
    def adds_verdicts(self) -> bool:
        """True where the plan puts verdicts into rollouts under names of its own, which `rewards` may name."""
        return False

    @declared
    def answer_characters(self) -> int:
        """Characters of a task's best answer that are read from the history; 0: answers are not kept."""
        return 0

    def check(self, context: RolloutContext, task: Task) -> None:
        """ConfigError where the run contradicts the plan; `task` is one of the run's."""

    @abstractmethod
    def __call__(self, draw: Draw, context: RolloutContext) -> AsyncIterator[Rollout]:
        """Yield the verified rollouts of a draw as they finish."""


CONTRACTS["plan"] = (RolloutPlan,)


class RolloutTokens:
    """The tokens of one rollout so far: the prompt, what the policy sampled, and what others put between.

    Token in, token out: sampled ids are kept as they came, with the log-probs and versions of their own call; what
    others wrote has NaN and -1. Tokens are only ever added at the end.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        # Arrays per column, joined once at the end: joining at each turn would copy a rollout as often as it has turns.
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
        self._segments: list[Segment] = []
        self._texts: list[str] = []
        self._seconds = 0.0
        self.sampled = 0
        """Tokens that the policy wrote."""
        self._length = 0
        self._extend(prompt, Origin.PROMPT)

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, as a request takes them."""
        return tuple(np.concatenate(self._parts["token_ids"]).tolist())

    @property
    def texts(self) -> tuple[str, ...]:
        """The policy's turns."""
        return tuple(self._texts)

    def turn(self, completion: Completion) -> None:
        """Append a completion that the policy sampled after the tokens so far."""
        self._segments.append(Segment("turn", len(self), len(self) + len(completion.token_ids)))
        self._extend(completion.token_ids, Origin.POLICY, completion.logprobs, completion.versions)
        self._texts.append(completion.text)
        self._seconds += completion.seconds
        self.sampled += len(completion.token_ids)

    def put(self, kind: str, token_ids: Sequence[int], origin: Origin) -> None:
        """A segment that the policy did not write."""
        self._segments.append(Segment(kind, len(self), len(self) + len(token_ids)))
        self._extend(token_ids, origin)

    def rollout(self, draw: Draw, member: int, stop: StopReason, temperature: float, **timings: float) -> Rollout:
        """The record. Its text is what the policy wrote and nothing else: its turns, each on lines of its own."""
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        return Rollout(
            id=f"{draw.number}/{member}",
            task=draw.task,
            group=str(draw.number),
            member=member,
            token_ids=columns["token_ids"],
            origin=columns["origin"],
            behaviour_logprobs=columns["behaviour_logprobs"],
            policy_version=columns["policy_version"],
            stop=stop,
            # `rlvr.rollout.characters.char_ends` counts on one character between turns.
            text="\n".join(self._texts),
            # Greedy sampling (0) reports log-probs at temperature 1 (`Sampling`), so that is what the trainer divides
            # logits by.
            temperature=temperature or 1.0,
            segments=self._segments,
            timings={"generate": self._seconds, **timings},
        )

    def _extend(
        self,
        token_ids: Sequence[int] | np.ndarray,
        origin: Origin,
        logprobs: Sequence[float] | np.ndarray | float = np.nan,
        versions: Sequence[int] | np.ndarray | int = -1,
    ) -> None:
        # Each value is [count], or one number for all `count` tokens (Origin is an IntEnum; NaN and -1 are the
        # defaults).
        count = len(token_ids)
        for (name, dtype), value in zip(_COLUMNS.items(), (token_ids, origin, logprobs, versions), strict=True):
            one = isinstance(value, (int, float))
            self._parts[name].append(np.full(count, value, dtype) if one else np.asarray(value, dtype))
        self._length += count


@register("plan", "single_turn")
@dataclass(frozen=True)
class SingleTurn(RolloutPlan):
    """`group_size` independent responses to the prompt."""

    baseline: Literal["greedy", "reference"] | None = None
    """A response that is verified and not trained, for advantages that compare with it: greedy, the response sampled at
    temperature 0; reference, the task's demonstration. null: none."""
    probe: bool = False
    """With `baseline: greedy`, sample that response first, and the others only where it is not right: tasks that the
    policy solves have no group (SELF, Nguyen et al. 2025, arXiv 2510.02230; mail-research/SELF-llm-interference, commit
    d17634b, verl/verl/trainer/ppo/ray_trainer.py, RayMaxPPOTrainer)."""

    one_group: ClassVar = True
    turns: ClassVar = 1

    def __post_init__(self) -> None:
        if self.probe and self.baseline != "greedy":
            raise ValueError("probe asks whether the greedy response is right: set baseline to greedy")

    @property
    def independent(self) -> bool:
        """True where no baseline is added."""
        # A group with a baseline has one member more that is not trained, which evaluation has no use for.
        return self.baseline is None

    def __call__(self, draw: Draw, context: RolloutContext) -> AsyncIterator[Rollout]:
        """Return the rollouts of one draw."""
        return single_turn(draw, context, baseline=self.baseline, probe=self.probe)


def single_turn(
    draw: Draw,
    context: RolloutContext,
    *,
    baseline: Literal["greedy", "reference"] | None = None,
    probe: bool = False,
) -> AsyncIterator[Rollout]:
    """`group_size` independent responses to the prompt. `baseline` adds one that is verified and not trained, for
    advantages that compare with it: greedy, the response sampled at temperature 0; reference, the task's
    demonstration. `probe`: first that one, and the others where it is not right."""
    prompt = context.encode(draw.task)

    async def member(number: int) -> Rollout:
        request = Request(prompt, context.sampling, context.seed(draw.number, number, 0))
        return make_rollout(draw, number, request, await context.generate(request))

    # An asynchronous generator: nothing runs before its first rollout is asked for.
    members = side_by_side(draw, context, member)
    if baseline is None:
        return members
    return _with_baseline(members, draw, context, baseline, probe)


async def _with_baseline(
    members: AsyncGenerator[Rollout, None], draw: Draw, context: RolloutContext, baseline: str, probe: bool
) -> AsyncIterator[Rollout]:
    """The members, and the rollout that they are compared with, verified by itself."""

    async def compared() -> Rollout:
        tokens = RolloutTokens(context.encode(draw.task))
        stop = StopReason.GIVEN
        if baseline == "greedy":
            sampling = dataclasses.replace(context.sampling, temperature=0.0)
            # The member after the last: members have 0 to group_size - 1, so no seed is used twice.
            seed = context.seed(draw.number, context.group_size, 0)
            completion = await context.generate(Request(tokens.token_ids, sampling, seed))
            tokens.turn(completion)
            stop = completion.stop
        # The temperature of a rollout that is not trained is not used.
        rollout = tokens.rollout(draw, context.group_size, stop, 1.0)
        rollout.role = BASELINE
        if baseline != "greedy":
            rollout.text = draw.task.demonstration or ""
        return await context.verify(rollout)

    # Begun before the members are iterated over, so that the engine batches its request with theirs.
    task = asyncio.ensure_future(compared())
    try:
        if probe:
            verdict = (await task).verdict
            if verdict is not None and verdict.status is VerdictStatus.CORRECT:
                # The members were not asked for, so that none is sampled.
                yield task.result()
                return
        # Closed explicitly: where the consumer stops early, `side_by_side` ends its members now and not when it is
        # collected.
        async with contextlib.aclosing(members):
            async for rollout in members:
                yield rollout
        yield await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def side_by_side(
    draw: Draw,
    context: RolloutContext,
    member: Callable[[int], Coroutine[Any, Any, Rollout]],
    verify: Callable[[Rollout], Awaitable[Rollout]] | None = None,
) -> AsyncGenerator[Rollout, None]:
    """`group_size` rollouts, each made by a coroutine `member(number)` of its own, verified and given as they finish.

    `verify` puts the verdict on a rollout; None: `context.verify` does. Where the task's verifier judges a group
    together, all are made first. However it ends, no member is left running.
    """
    by_group = context.by_group(draw.task)
    verify = verify or context.verify

    async def judged(number: int) -> Rollout:
        rollout = await member(number)
        return rollout if by_group else await verify(rollout)

    members = [asyncio.ensure_future(judged(number)) for number in range(context.group_size)]
    try:
        if by_group:
            # A verifier of groups compares the members, so it has to wait for the slowest.
            for rollout in await context.verify_group(await asyncio.gather(*members)):
                yield rollout
        else:
            for done in asyncio.as_completed(members):
                yield await done
    finally:
        # Reached by exceptions and by `aclose()` of an abandoned generator too. A member left running would keep a row
        # of the engine for a rollout that nobody reads.
        for task in members:
            # Cancelled where the members raised; a no-op where it is done. Awaited, so that its request is aborted on
            # return.
            task.cancel()
        await asyncio.gather(*members, return_exceptions=True)


def make_rollout(draw: Draw, member: int, request: Request, completion: Completion) -> Rollout:
    """The record of one completion after its prompt."""
    tokens = RolloutTokens(request.token_ids)
    tokens.turn(completion)
    return tokens.rollout(draw, member, completion.stop, request.sampling.temperature)


def evaluation_plan(spec: SpecLike) -> Plan:
    """Return the plan of evaluation for a stage that samples with the plan `spec`: that plan itself where it is
    `independent`, which means `group_size` independent rollouts of every draw; otherwise `single_turn`."""
    plan: RolloutPlan = registry.build("plan", spec)
    return plan if plan.independent else SingleTurn()
