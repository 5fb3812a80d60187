"""The plan of DARS: more responses to prompts that the first ones show to be hard."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from rlvr.errors import ConfigError
from rlvr.records import Rollout, Task
from rlvr.registry import register
from rlvr.rollout import Draw, Request, RolloutContext, RolloutPlan, make_rollout, side_by_side

# The authors count half a right response of N where all are wrong, so that the need of such a prompt is finite.
FEWEST_RIGHT = 0.5
"""Right responses that a group without any is taken to have."""


@register("plan", "dars")
@dataclass(frozen=True)
class DifficultyAdaptiveSampling(RolloutPlan):
    """`group_size` responses first, then as many more as the sum of absolute advantages of a hard prompt lacks.

    With centred rewards a group of N responses with pass rate u has the sum N 2u(1 - u), which is largest, N / 2, at
    u = 1/2 (DARS, Yang et al. 2025, arXiv 2508.13755; yangzhch6/DARS, commit 9b21b71, verl/trainer/ppo/
    ray_dars_trainer.py, schedule_ET and schedule_HW). Prompts with u of 1/2 or more get no more responses.
    """

    schedule: Literal["equal", "hardness"] = "equal"
    """equal: each hard prompt is brought to N / 2; hardness: to 2 (1 - u) N / 2, more the harder it is."""
    most: int = 32
    """Most responses to a prompt in all."""
    one_group = True

    def check(self, context: RolloutContext, task: Task) -> None:
        """ConfigError where `most` leaves no response beside the first ones."""
        if self.most <= context.group_size:
            raise ConfigError(
                f"rollout.plan dars: most is {self.most}, and has to be above rollout.group_size, {context.group_size}"
            )

    def further(self, pass_rate: float, first: int) -> int:
        """The responses to sample after the first ones, of which the share `pass_rate` was right."""
        if pass_rate >= 0.5:
            return 0
        u = pass_rate or FEWEST_RIGHT / first
        each = 2 * u * (1 - u)
        wanted = 0.5 * first
        if self.schedule == "hardness":
            wanted *= 2 * (1 - u)
        return min(math.ceil((wanted - first * each) / each), self.most - first)

    async def __call__(self, draw: Draw, context: RolloutContext) -> AsyncIterator[Rollout]:
        """Yield the first responses, then the further ones, as each part finishes."""
        prompt = context.encode(draw.task)
        scores: list[float] = []
        begin = 0
        size = context.group_size
        while size > 0:
            part = dataclasses.replace(context, group_size=size)

            async def member(number: int, begin: int = begin) -> Rollout:
                request = Request(prompt, context.sampling, context.seed(draw.number, begin + number, 0))
                return make_rollout(draw, begin + number, request, await context.generate(request))

            async with contextlib.aclosing(side_by_side(draw, part, member)) as members:
                async for rollout in members:
                    if rollout.verdict is not None and rollout.verdict.score is not None:
                        scores.append(rollout.verdict.score)
                    yield rollout
            # The second part is the last; without a decided verdict in the first nothing is known of the prompt.
            if begin == 0 and scores:
                size = self.further(sum(scores) / len(scores), size)
            else:
                size = 0
            begin = context.group_size
