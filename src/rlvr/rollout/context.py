"""What a plan works with: the engine, the verifier and the prompts of a step, and counts of what was asked of them.

Invariant: counts only grow, so that whoever shows them takes differences and resets nothing.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlvr.core.seeding import seed_of
from rlvr.data import Prompts
from rlvr.records import Rollout, Task
from rlvr.rollout.engine import Completion, Engine, Request, Sampling
from rlvr.verifiers.pool import Verification

BATCH_DELAY = 0.02
"""Seconds that a finished rollout can wait for others to be verified with, while sampling goes on: the event loop of the engine
gives way after each decoding step, which takes milliseconds, and the members of a group end some steps apart."""


class IdleClock:
    """Counts open requests, from any thread: `with clock.request(): ...` around each request, `take()` for the seconds since the
    last call in which none was open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._idle = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from being made to being answered."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def take(self) -> float:
        """Idle seconds since the last call."""
        self._change(0)
        with self._lock:
            idle = self._idle
            self._idle = 0.0
            return idle

    def _change(self, by: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if not self._open:
                self._idle += now - self._since
            self._open += by
            self._since = now


class IdleByPhase:
    """An engine's idle seconds by phase of a step."""

    def __init__(self, clock: IdleClock) -> None:
        self._clock = clock
        self.seconds: dict[str | None, float] = {}
        """By phase; None: in none of them."""

    def start(self) -> None:
        """Begin a step."""
        self.seconds.clear()
        self._clock.take()

    def settle(self, phase: str | None) -> None:
        """Give the idle seconds since the last call to a phase, or to none."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._clock.take()


class Activity:
    """Completions and verdicts, asked for and done, and the engine's idle time. One thread counts, any may read."""

    def __init__(self) -> None:
        self.idle = IdleClock()
        self.asked = {"sampling": 0, "verifying": 0}
        self.done = {"sampling": 0, "verifying": 0}

    def counts(self) -> dict[str, tuple[int, int]]:
        """`sampling` and `verifying` -> (done, asked for) since the run began."""
        return {name: (self.done[name], asked) for name, asked in self.asked.items()}

    def patience(self) -> float:
        """Seconds that a verdict can wait for others; none where it is the last that is waited for."""
        return BATCH_DELAY if self.asked["sampling"] > self.done["sampling"] else 0.0

    @contextmanager
    def counted(self, name: str, count: int = 1) -> Iterator[None]:
        """`count` of them, asked for now, and done at the end of the block, however it ends."""
        self.asked[name] += count
        try:
            yield
        finally:
            self.done[name] += count


@dataclass
class RolloutContext:
    """What a plan works with in one step. Its methods count what they are asked for in `activity`."""

    engine: Engine
    verification: Verification
    prompts: Prompts
    sampling: Sampling
    group_size: int
    context: int
    """Most tokens of a rollout, prompt included."""
    history: Any
    """Per-prompt history: `history[task id]`. It has a best answer where the plan, a class, has `answer_characters` above 0."""
    seed_path: tuple[int | str, ...] = ()
    """Beginning of the path of each seed, so that no seed depends on the order of events (N7)."""
    activity: Activity = field(default_factory=Activity)
    sampled_at: float = field(default_factory=time.perf_counter, init=False)
    """When the last completion was sampled, by time.perf_counter."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion."""
        with self.activity.counted("sampling"), self.activity.idle.request():
            completion = await self.engine.generate(request)
        self.sampled_at = time.perf_counter()
        return completion

    async def verify(self, rollout: Rollout) -> Rollout:
        """The rollout with its verdicts; never raises for the verifier's trouble."""
        with self.activity.counted("verifying"):
            return await self.verification.verify(rollout)

    async def verify_group(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts of one task with their verdicts, judged together."""
        with self.activity.counted("verifying", len(rollouts)):
            return await self.verification.verify_group(rollouts)

    def by_group(self, task: Task) -> bool:
        """Whether the verifier of a task wants a group together (`verify` then judges a rollout as a group of one)."""
        return self.verification.by_group(task)

    def same_answer(self, task: Task, first: str, second: str) -> bool:
        """Whether two extracted answers to a task are the same, as its verifier sees it."""
        return self.verification.same_answer(task, first, second)

    def encode(self, task: Task) -> tuple[int, ...]:
        """The token ids of a task's prompt."""
        return self.prompts(task)

    def prompt(self, task: Task) -> tuple[int, ...]:
        """The name that `encode` had in the version before."""
        text = "RolloutContext.prompt is now RolloutContext.encode: the old name goes with the next version"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return self.encode(task)

    def reply(self, task: Task, text: str, role: str, end: int | None) -> tuple[int, ...]:
        """The token ids that put a text, said by `role`, into the context after a turn of the policy's. `end` is the end token that
        the policy sampled, or None."""
        return self.prompts.reply(task, text, role, end)

    def seed(self, draw: int, member: int, call: int) -> int:
        """The seed of a call of a member's, 63 bits."""
        return seed_of(*self.seed_path, draw, member, call)
