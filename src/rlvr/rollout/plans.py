"""Plans: what a group of rollouts is made of.

A plan owns groups. It is an asynchronous generator over one draw of a task that yields verified rollouts as they finish,
with the means to make them injected; it may ask for as many generations, verdicts and further rollouts as it likes, and
nothing else knows how many calls were made. It names its groups by the draw's number, further ones `NUMBER/...`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr import registry
from rlvr.data import Draw
from rlvr.records import Rollout, Task
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
    """Per-prompt history: `history[task id]`."""
    verify_group: Callable[[Sequence[Rollout]], Awaitable[list[Rollout]]] | None = None
    """Put the verdicts on rollouts of one task, judged together."""
    by_group: Callable[[Task], bool] = lambda task: False
    """Whether the verifier of a task wants a group together (`verify` then judges a rollout as a group of one)."""


Plan = Callable[[Draw, Means], AsyncIterator[Rollout]]


@register("plan", "single_turn")
def single_turn(draw: Draw, means: Means) -> AsyncIterator[Rollout]:
    """`group_size` independent responses to the prompt."""
    prompt = means.prompt(draw.task)

    async def member(number: int) -> Rollout:
        request = Request(prompt, means.sampling, means.seed(draw.number, number, 0))
        return make_rollout(draw, number, request, await means.generate(request))

    return side_by_side(draw, means, member)


async def side_by_side(
    draw: Draw, means: Means, member: Callable[[int], Coroutine[Any, Any, Rollout]]
) -> AsyncIterator[Rollout]:
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


def evaluation_plan(spec: str | Mapping[str, Any]) -> Plan:
    """What evaluation samples with where a stage samples with the plan `spec`: that plan itself where it says that it is
    `independent`, which means `group_size` independent rollouts of every draw; otherwise `single_turn`."""
    plan: Plan = registry.build("plan", spec)
    return plan if getattr(plan, "independent", False) else single_turn
