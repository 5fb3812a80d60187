"""Plans: what a group of rollouts is made of.

A plan owns groups. It is an asynchronous generator over one draw of a task that yields verified rollouts as they finish,
with the means to make them injected; it may ask for as many generations, verdicts and further rollouts as it likes, and
nothing else knows how many calls were made. It names its groups by the draw's number, further ones `NUMBER/...`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.data import Draw
from rlvr.records import Origin, Rollout, Segment, Task
from rlvr.registry import register
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
async def single_turn(draw: Draw, means: Means) -> AsyncIterator[Rollout]:
    """`group_size` independent responses to the prompt."""
    prompt, by_group = means.prompt(draw.task), means.by_group(draw.task)

    async def member(number: int) -> Rollout:
        request = Request(prompt, means.sampling, means.seed(draw.number, number, 0))
        rollout = make_rollout(draw, number, request, await means.generate(request))
        return rollout if by_group else await means.verify(rollout)

    members = [asyncio.ensure_future(member(number)) for number in range(means.group_size)]
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


def make_rollout(draw: Draw, member: int, request: Request, completion: Completion) -> Rollout:
    """The record of one completion after its prompt."""
    prompt, sampled = len(request.token_ids), len(completion.token_ids)

    def column(head: Any, tail: Any, dtype: Any) -> np.ndarray:
        return np.concatenate([np.full(prompt, head, dtype=dtype), np.asarray(tail, dtype=dtype)])

    return Rollout(
        id=f"{draw.number}/{member}",
        task=draw.task,
        group=str(draw.number),
        member=member,
        token_ids=np.concatenate([np.asarray(request.token_ids, dtype=np.int64), completion.token_ids]),
        origin=column(Origin.PROMPT, np.full(sampled, Origin.POLICY), np.int8),
        behaviour_logprobs=column(np.nan, completion.logprobs, np.float32),
        policy_version=column(-1, completion.versions, np.int32),
        stop=completion.stop,
        text=completion.text,
        temperature=request.sampling.temperature or 1.0,
        segments=[Segment("turn", prompt, prompt + sampled)],
        timings={"generate": completion.seconds},
    )
