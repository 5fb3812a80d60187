"""The servers of an engine: their states, their open requests, and the restart of those that were lost.

Invariant: a server that failed is `stale` until it has the current weights again, and a stale one is never asked.
Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from rlvr.core.daemon_calls import awaited_in_daemon
from rlvr.core.process.deadline import Deadline
from rlvr.errors import TrainingError
from rlvr.rollout.vllm.client import Client, ServerError
from rlvr.rollout.vllm.requests import Answer
from rlvr.rollout.vllm.started import CALL, StartedServer

log = logging.getLogger(__name__)


class State(enum.StrEnum):
    """The state of a server."""

    STALE = "stale"
    """It has other weights than the current ones, or none."""
    READY = "ready"
    GONE = "gone"
    """It failed too often."""


@dataclass(eq=False)
class Member:
    """One server."""

    name: str
    client: Client
    started: StartedServer | None
    """None for a server given by URL."""
    state: State = State.STALE
    returns: int = 0
    """Number of attempts to bring it back."""
    returning: bool = False
    generation: int = 0
    """Number of times that its process may have been replaced by a new one, which has none of the state of the one
    before."""
    tokens: int = 0
    """Prompt tokens and most tokens to sample of what is open."""
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set)
    trouble: str = ""

    @property
    def process(self) -> ServerProcess:
        """The process that answers now: the key of whatever was sent to it or agreed with it."""
        return self, self.generation

    @property
    def is_up(self) -> bool:
        """A publish can go to it: it is in use, or is back and waits for one."""
        return self.state == State.READY or (self.state == State.STALE and not self.returning)


ServerProcess = tuple[Member, int]
"""One process of one server."""


class Members:
    """Balances requests and brings lost servers back."""

    def __init__(
        self,
        members: list[Member],
        catch_up: Callable[[Member], bool],
        in_parts: Callable[[], bool],
        current: Callable[[Answer], bool],
        inside: Callable[[], AbstractAsyncContextManager[None]],
        returns: int,
        start_timeout: float,
        health: tuple[float, float],
    ) -> None:
        self.all = members
        self._catch_up = catch_up
        """Gives a server the current weights, from a thread; False when they cannot be had before the next publish."""
        self._in_parts = in_parts
        """True if other ranks have parts of the weights, so that only a publish can give them."""
        self._current = current
        self._inside = inside
        """Entered around each attempt at a request: a publish waits until no attempt is inside."""
        self.publish_comes = True
        """True from `release` to the end of the publish: the trainer is past sampling and publishes next, so a server
        may wait for that."""
        self._returns = returns
        self._start_timeout = start_timeout
        self._every, self._health_timeout = health
        # All state below changes on one loop, so a condition is needed only to wake those who wait for a change, not to
        # exclude.
        self._changed = asyncio.Condition()
        self._closed = False
        self._background: set[asyncio.Task[None]] = set()

    def watch(self) -> None:
        """Look after the servers' health from now on."""
        self._keep(self._watch())

    async def run(self, cost: int, ask: Callable[[Client], Awaitable[Answer]]) -> Answer:
        """The answer of a server that has the current weights; asked again elsewhere when a server is lost
        meanwhile."""
        while True:
            await self._one_ready()
            # Entered only after a server is ready: whoever is inside keeps a `finish` publish waiting, and one that
            # waits for a server which only that publish can make ready would wait for ever.
            async with self._inside():
                # Chosen after the gate was passed: servers may have been lost while the gate was shut.
                if (member := self._least_busy()) is None:  # lost while a publish was waited for
                    continue
                answer = await self._asked(member, cost, ask)
            if answer is not None:
                return answer

    async def _asked(self, member: Member, cost: int, ask: Callable[[Client], Awaitable[Answer]]) -> Answer | None:
        """The answer of this server; None when the server is lost."""
        task = asyncio.ensure_future(ask(member.client))
        member.tokens += cost
        member.tasks.add(task)
        try:
            # `wait` and not `await task`: it does not cancel the request with the waiter, so that the two kinds of
            # cancellation can be told apart below.
            await asyncio.wait([task])
            answer = task.result()
        except asyncio.CancelledError:
            # Cancelled by `lose`: the task is cancelled and this coroutine is not (`cancelling()` counts requests to
            # cancel it). Cancelled by the caller: the other way round; the request is then given up as well.
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():  # the server was lost
                return None
            task.cancel()
            raise
        except ServerError as error:
            await self.lose(member, str(error))
            return None
        finally:
            member.tokens -= cost
            member.tasks.discard(task)
        # A server that was restarted by its owner answers with other weights: its tokens are thrown away, by
        # their version labels.
        if self._current(answer):
            return answer
        await self.lose(member, f"it sampled with weights {answer.versions}")
        return None

    async def lose(self, member: Member, trouble: str) -> None:
        """Mark a server stale, give up what is open there, and begin to bring it back."""
        if self._closed or member.state == State.GONE:
            return
        if member.returning:
            member.trouble = trouble  # `_returned` reports it and tries again
            return
        log.warning(
            "%s is stale: %s; its %d requests are sent to other servers", member.name, trouble, len(member.tasks)
        )
        # Order: the state and the generation change before the first `await`, so that neither a new request nor a
        # publish that is under way takes the server for a sound one.
        member.state = State.STALE
        member.trouble = trouble
        member.returning = True
        member.generation += 1  # at once: a publish that is under way must not take it into use
        for task in member.tasks:
            task.cancel()
        self._keep(self._bring_back(member))
        self._use_waiting()

    async def ready(self, processes: Iterable[ServerProcess]) -> None:
        """Take processes that have the current weights into use together, but for those that were lost meanwhile."""
        async with self._changed:
            for process in processes:
                member = process[0]
                # The generation differs where the server was lost after the weights were sent to it.
                if member.process == process:
                    member.state = State.READY
            self._changed.notify_all()

    def close(self) -> None:
        """Restart no server from now on; the owner of the loop cancels the tasks."""
        self._closed = True

    async def published(self) -> None:
        """The publish is over: from here on the trainer may wait for responses before the next one."""
        async with self._changed:
            self.publish_comes = False
            self._use_waiting()
            self._changed.notify_all()

    async def one_up(self) -> None:
        """Wait until a publish can go to a server that answers, while one may come back. TrainingError when none
        will."""
        up = [member for member in self.all if member.is_up]
        # Asked before a publish begins: by NCCL one member that does not take part holds up all the others.
        well = await asyncio.gather(*(member.client.responsive(self._health_timeout) for member in up))
        for member, is_well in zip(up, well, strict=True):
            if not is_well:
                await self.lose(member, f"its engine did not answer within {self._health_timeout:g} s before a publish")
        async with self._changed:
            while not any(member.is_up for member in self.all):
                if not any(member.returning for member in self.all):
                    raise TrainingError(f"every vLLM server is lost: {self.troubles()}")
                await self._changed.wait()

    def _use_waiting(self) -> None:
        """Have one server that waits for the next publish given the weights, where no other samples: it would not
        come."""
        # No server samples, and the trainer waits for responses before it publishes: without this both would wait for
        # ever.
        waiting = [member for member in self.all if member.is_up]
        gives = not self._closed and not self.publish_comes and not self._in_parts()
        if waiting and gives and self._least_busy() is None:
            # Marked before the task runs, so that a second call does not choose it again.
            waiting[0].returning = True
            self._keep(self._bring_back(waiting[0], answers=True))

    def troubles(self) -> str:
        """Troubles of the servers that are not ready, by name."""
        return "; ".join(f"{member.name}: {member.trouble}" for member in self.all if member.state != State.READY)

    async def _one_ready(self) -> None:
        """Wait until a server is ready, while one may become so. TrainingError when none will."""
        async with self._changed:
            while self._least_busy() is None:
                if all(member.state == State.GONE for member in self.all):
                    raise TrainingError(f"every vLLM server is lost: {self.troubles()}")
                if not self.publish_comes and not any(member.returning for member in self.all):
                    raise TrainingError(
                        "every vLLM server was lost, and those that are back need weights that only the next publish "
                        f"can give: {self.troubles()}. Go on with --resume auto"
                    )
                await self._changed.wait()

    def _least_busy(self) -> Member | None:
        """The ready server with the least to do."""
        ready = [member for member in self.all if member.state == State.READY]
        # Tokens and not requests: a prompt of 30,000 tokens weighs more than ten short ones.
        return min(ready, key=lambda member: member.tokens, default=None)

    async def _bring_back(self, member: Member, answers: bool = False) -> None:
        """Give a server the current weights, started anew unless it `answers`."""
        try:
            while not await self._returned(member, answers):
                answers = False
        finally:
            async with self._changed:
                member.returning = False
                self._use_waiting()  # the servers that sampled may have been lost while this one was left to wait
                self._changed.notify_all()

    async def _returned(self, member: Member, answers: bool) -> bool:
        """Try once to bring a server back; False where it has to be tried again."""
        if not answers:
            if member.returns >= self._returns:
                log.error("%s is given up after %d returns: %s", member.name, member.returns, member.trouble)
                member.state = State.GONE
                return True
            member.returns += 1
        try:
            if not answers:
                await self._revive(member)
            # In a thread: it sends weights and takes the weights lock, which a publish may hold for minutes.
            if await awaited_in_daemon(lambda: self._catch_up(member), CALL):
                if member.state != State.READY:  # others of its group took the weights, and it did not
                    raise ServerError(member.trouble)
                log.warning("%s is back with the current weights", member.name)
            # else the next publish brings it the weights
        except Exception as error:  # any error concerns this server alone, and is tried again
            member.trouble = f"{type(error).__name__}: {error}"
            log.warning("%s did not come back: %s", member.name, member.trouble)
            return False
        return True

    async def _revive(self, member: Member) -> None:
        member.generation += 1  # also for a server given by URL: whoever runs it may have started it anew
        if member.started is not None:
            await member.client.close()
            # Now, since its end and the start of the next process overwrite what tells why it hung or died.
            text = await awaited_in_daemon(member.started.explain, CALL)
            if text:
                log.warning("%s is started anew; the log of its process ends with:\n%s", member.name, text)
            # Ended first also where it only hangs: it holds the GPU's memory, which the new process needs. `end` waits
            # for a process group.
            await awaited_in_daemon(member.started.end, CALL)
            member.client = await member.started.start(self._start_timeout)
            return
        # A server given by URL is not ours to start; whoever runs it may do so within this time.
        async with Deadline(self._start_timeout):
            while not await member.client.responsive(self._health_timeout):
                await asyncio.sleep(self._every)

    async def _watch(self) -> None:
        # Asked over HTTP and not watched as a child (core/process): a server given by URL is another's process, and one
        # that hangs lives on.
        while True:
            await asyncio.sleep(self._every)
            # A server that answered since `lately` is well, and may be too busy for a check. A call that is under
            # way (a publish) may keep the engine core busy for long, and has a deadline of its own.
            lately = time.monotonic() - self._every
            silent = [
                m for m in self.all if m.state == State.READY and m.client.answered < lately and not m.client.calls
            ]
            well = await asyncio.gather(*(member.client.responsive(self._health_timeout) for member in silent))
            for member, is_well in zip(silent, well, strict=True):
                # Tested again after the wait: the server may have answered a request, or a publish may have begun,
                # meanwhile.
                if not is_well and member.client.answered < lately and not member.client.calls:
                    await self.lose(member, f"its engine did not answer within {self._health_timeout:g} s")

    def _keep(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        # asyncio keeps weak references to tasks only: one that nobody holds may be collected before it ends.
        self._background.add(task)
        task.add_done_callback(self._background.discard)
