"""The plan of several turns: the policy writes, a tool or an environment answers, and so on in one growing context.

Token in, token out: a turn is sampled after the very ids of all turns before it; only replies are tokenised.
Invariants: the reply's tokens have the origin TOOL and are never trained; the rollout's text, which verifiers read, is
the policy's own, so a tool's output is never rewarded as an answer; every member of a group is a coroutine of its
own, so a slow tool holds up one rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlvr.data import Draw
from rlvr.errors import ConfigError
from rlvr.records import Origin, Rollout, StopReason, Task
from rlvr.registry import register
from rlvr.rollout.engine import Request
from rlvr.rollout.environments import EnvironmentCalls, EpisodeCalls
from rlvr.rollout.plans import RolloutContext, RolloutPlan, RolloutTokens, side_by_side


@register("plan", "turns")
@dataclass
class Turns(RolloutPlan):
    """`group_size` independent conversations of the policy with an environment. `rollout.max_new_tokens` is what the
    policy may sample in all turns together; where it or the context is used up, the rollout is cut off."""

    environment: str | Mapping[str, Any]
    """The environment that answers a turn: a registered name, `FILE.py:Name`, or a mapping with its options."""
    turns: int = 4
    """Most turns of the policy; what it writes in the last one is not answered."""
    time_limit: float = 30.0
    """Seconds for one call of the environment; past it the policy reads an error."""
    role: Literal["user", "tool"] = "user"
    """The role of the reply in the chat, where the prompt is one."""

    judge: Literal["all", "each"] = "all"
    """The text that is verified. all: that of all turns as one; each: each turn by itself, so that no turn is paid for
    another's answer. The rollout's verdict is then that of its last turn, and those of all are `turn 1`, `turn 2` ...
    (the reward term `verdict` reads them with `verifier: turn 1`)."""

    independent = True

    def __post_init__(self) -> None:
        if self.turns < 1 or not self.time_limit > 0:
            raise ValueError(f"turns={self.turns} must be 1 or more and time_limit={self.time_limit} above 0")
        self._environment = EnvironmentCalls(self.environment, self.time_limit)

    @property
    def adds_verdicts(self) -> bool:
        """True where each turn has a verdict."""
        return self.judge == "each"

    def check(self, context: RolloutContext, task: Task) -> None:
        """ConfigError when a reply cannot be put into the context of `task`."""
        context.reply(task, "", self.role, None)
        if self.judge == "each" and context.by_group(task):
            raise ConfigError(
                "rollout.plan: `judge: each` has turns judged one by one, and the verifier judges a group together: "
                "set judge to all, or choose another verifier"
            )

    def __call__(self, draw: Draw, context: RolloutContext) -> AsyncIterator[Rollout]:
        """The rollouts of one draw."""

        # The texts of each rollout's turns, by rollout id, for `judge: each`: the record holds them only joined.
        turn_texts: dict[str, tuple[str, ...]] = {}

        async def member(number: int) -> Rollout:
            episode = self._environment.episode(draw.task)
            tokens = RolloutTokens(context.encode(draw.task))
            try:
                rollout = await self._converse(draw, number, context, episode, tokens)
            # Closed before the rollout is verified: a container need not wait for a slow verifier.
            finally:
                await episode.close()
            turn_texts[rollout.id] = tokens.texts
            return rollout

        async def each(rollout: Rollout) -> Rollout:
            return await _judged_by_turn(rollout, turn_texts[rollout.id], context)

        return side_by_side(draw, context, member, verify=each if self.judge == "each" else None)

    async def _converse(
        self, draw: Draw, member: int, context: RolloutContext, episode: EpisodeCalls, tokens: RolloutTokens
    ) -> Rollout:
        answering = 0.0
        # One budget for all turns, so what remains of it is the bound of this one.
        for turn in range(self.turns):
            remaining = context.sampling.max_new_tokens - tokens.sampled
            sampling = dataclasses.replace(context.sampling, max_new_tokens=remaining)
            # The ids as they were sampled, never the text tokenised again: a second tokenisation may split differently,
            # and the log-probs would then be of other tokens than those that train.
            request = Request(tokens.token_ids, sampling, context.seed(draw.number, member, turn))
            completion = await context.generate(request)
            tokens.turn(completion)
            stop = completion.stop
            # A turn that was cut off is not answered: the environment would read half a call.
            if stop.truncated or turn + 1 == self.turns:
                break
            start = time.perf_counter()
            text = await episode.reply(completion.text)
            answering += time.perf_counter() - start
            if text is None:
                break
            # After an end token the reply begins behind it; a turn that ended with a stop string has none, and the
            # template's is put in (see Prompts.reply).
            if stop is StopReason.END:
                end = int(completion.token_ids[-1])
            else:
                end = None
            reply = context.reply(draw.task, text, self.role, end)
            # The reply is left out where no token could follow it: it would cost context and teach nothing.
            if cut := _cut(tokens, len(reply), context):
                stop = cut
                break
            tokens.put("tool", reply, Origin.TOOL)
        return tokens.rollout(draw, member, stop, context.sampling.temperature, tool=answering)


async def _judged_by_turn(rollout: Rollout, turns: Sequence[str], context: RolloutContext) -> Rollout:
    """The rollout with the verdict of its last turn, whose spans are moved to where that turn stands, and those of all
    turns."""
    alone = [dataclasses.replace(rollout, text=text, verdicts={}, timings={}) for text in turns]
    judged = await asyncio.gather(*(context.verify(one) for one in alone))
    # Spans of the last verdict are in characters of the last turn's text, which stands at the end of the rollout's.
    start = len(rollout.text) - len(turns[-1])
    for name, verdict in judged[-1].verdicts.items():
        spans = tuple((a + start, b + start, score) for a, b, score in verdict.spans)
        rollout.verdicts[name] = dataclasses.replace(verdict, spans=spans)
    for number, one in enumerate(judged, start=1):
        assert one.verdict is not None, "a verified rollout has a verdict"
        rollout.verdicts[f"turn {number}"] = one.verdict
    rollout.timings["verify"] = sum(one.timings.get("verify", 0.0) for one in judged)
    return rollout


def _cut(tokens: RolloutTokens, reply: int, context: RolloutContext) -> StopReason | None:
    """Why a reply of so many tokens and one sampled token after it do not fit; None where they do."""
    if tokens.sampled >= context.sampling.max_new_tokens:
        return StopReason.LENGTH
    # >= and not >: one sampled token has to fit behind the reply.
    if len(tokens) + reply >= context.context:
        return StopReason.CONTEXT
    return None
