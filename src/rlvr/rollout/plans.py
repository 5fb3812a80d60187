"""Plans: what a group of rollouts is made of.

A plan owns groups. It is an asynchronous generator over one draw of a task that yields verified rollouts as they finish,
with the means to make them injected; it may ask for as many generations, verdicts and further rollouts as it likes, and
nothing else knows how many calls were made. It names its groups by the draw's number, further ones `NUMBER/...`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlvr import registry
from rlvr.data import Draw
from rlvr.records import BASELINE, Rollout, StopReason, Task
from rlvr.registry import register
from rlvr.rollout.context import Context
from rlvr.rollout.engine import Completion, Request, Sampling


@dataclass(frozen=True)
class Means:
    """What a plan works with."""

    generate: Callable[[Request], Awaitable[Completion]]
    """Sample one completion."""
    verify: Callable[[Rollout], Awaitable[Rollout]]
    """Put the verdicts on a rollout; never raises for the verifier's trouble."""
    prompt: Callable[[Task], tuple[int, ...]]
    """The token ids of a task's prompt."""
    reply: Callable[[Task, str, str, int | None], tuple[int, ...]]
    """The token ids that put a text into the context after a turn of the policy's: (task, text, role of who says it, the
    end token that the policy sampled or None)."""
    context: int
    """Most tokens of a context."""
    seed: Callable[..., int]
    """A seed for (draw number, member, call)."""
    sampling: Sampling
    group_size: int
    history: Any
    """Per-prompt history: `history[task id]`. It has a best answer where the plan, a class, has `answer_characters` above 0."""
    verify_group: Callable[[Sequence[Rollout]], Awaitable[list[Rollout]]] | None = None
    """Put the verdicts on rollouts of one task, judged together."""
    by_group: Callable[[Task], bool] = lambda task: False
    """Whether the verifier of a task wants a group together (`verify` then judges a rollout as a group of one)."""
    same_answer: Callable[[Task, str, str], bool] = lambda task, first, second: first.strip() == second.strip()
    """Whether two extracted answers to a task are the same, as its verifier sees it."""


Plan = Callable[[Draw, Means], AsyncIterator[Rollout]]


@register("plan", "single_turn")
def single_turn(
    draw: Draw, means: Means, *, baseline: Literal["greedy", "reference"] | None = None
) -> AsyncIterator[Rollout]:
    """`group_size` independent responses to the prompt. `baseline` adds one that is verified and not trained, for advantages
    that compare with it: greedy, the response sampled at temperature 0; reference, the task's demonstration."""
    prompt = means.prompt(draw.task)

    async def member(number: int) -> Rollout:
        request = Request(prompt, means.sampling, means.seed(draw.number, number, 0))
        return make_rollout(draw, number, request, await means.generate(request))

    members = side_by_side(draw, means, member)
    return members if baseline is None else _with_baseline(members, draw, means, baseline)


async def _with_baseline(
    members: AsyncGenerator[Rollout, None], draw: Draw, means: Means, baseline: str
) -> AsyncIterator[Rollout]:
    """The members, and the rollout that they are compared with, verified by itself."""

    async def compared() -> Rollout:
        context, stop = Context(means.prompt(draw.task)), StopReason.GIVEN
        if baseline == "greedy":
            sampling = dataclasses.replace(means.sampling, temperature=0.0)
            seed = means.seed(draw.number, means.group_size, 0)
            completion = await means.generate(Request(context.token_ids, sampling, seed))
            context.turn(completion)
            stop = completion.stop
        rollout = context.rollout(draw, means.group_size, stop, 1.0)
        rollout.role = BASELINE
        rollout.text = rollout.text if baseline == "greedy" else draw.task.demonstration or ""
        return await means.verify(rollout)

    task = asyncio.ensure_future(compared())
    try:
        async with contextlib.aclosing(members):
            async for rollout in members:
                yield rollout
        yield await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def side_by_side(
    draw: Draw, means: Means, member: Callable[[int], Coroutine[Any, Any, Rollout]]
) -> AsyncGenerator[Rollout, None]:
    """`group_size` rollouts, each made by a coroutine `member(number)` of its own, verified and given as they finish.

    Where the task's verifier judges a group together, all are made first. However it ends, no member is left running.
    """
    by_group = means.by_group(draw.task)

    async def judged(number: int) -> Rollout:
        rollout = await member(number)
        return rollout if by_group else await means.verify(rollout)

    members = [asyncio.ensure_future(judged(number)) for number in range(means.group_size)]
    try:
        if by_group:
            assert means.verify_group is not None
            for rollout in await means.verify_group(await asyncio.gather(*members)):
                yield rollout
        else:
            for done in asyncio.as_completed(members):
                yield await done
    finally:
        for task in members:
            task.cancel()
        await asyncio.gather(*members, return_exceptions=True)


def make_rollout(draw: Draw, member: int, request: Request, completion: Completion) -> Rollout:
    """The record of one completion after its prompt."""
    context = Context(request.token_ids)
    context.turn(completion)
    return context.rollout(draw, member, completion.stop, request.sampling.temperature)


def answer_characters(plan: Plan) -> int:
    """Characters of a task's best answer that a plan reads from the history, 0 where it does not say: it may be a function."""
    return int(getattr(plan, "answer_characters", 0))


def evaluation_plan(spec: str | Mapping[str, Any]) -> Plan:
    """What evaluation samples with where a stage samples with the plan `spec`: that plan itself where it says that it is
    `independent`, which means `group_size` independent rollouts of every draw; otherwise `single_turn`."""
    plan: Plan = registry.build("plan", spec)
    return plan if getattr(plan, "independent", False) else single_turn
