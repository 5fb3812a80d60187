"""What is under way inside a step: completions and verdicts, asked for and done, and the engine's idle time.

Invariant: counts only grow, so that whoever shows them takes differences and resets nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlvr.records import Rollout
from rlvr.rollout.engine import Completion, Request
from rlvr.rollout.idle import IdleClock
from rlvr.rollout.plans import Means

HOLD = 0.02
"""Seconds that a finished rollout can wait for others to be verified with, while sampling goes on."""


class Activity:
    """Counts what plans ask for: `means = activity.watched(means)`. One is counted on one thread, and read from any."""

    def __init__(self) -> None:
        self.idle = IdleClock()
        self._asked: Counter[str] = Counter()
        self._done: Counter[str] = Counter()

    def counts(self) -> dict[str, tuple[int, int]]:
        """`sampling` and `verifying` -> (done, asked for) since the run began."""
        return {name: (self._done[name], self._asked[name]) for name in ("sampling", "verifying")}

    def patience(self) -> float:
        """Seconds that a verdict can wait for others; none where it is the last that is waited for."""
        return HOLD if self._asked["sampling"] > self._done["sampling"] else 0.0

    def watched(self, means: Means) -> Means:
        """The same means, counted."""

        async def generate(request: Request) -> Completion:
            self._asked["sampling"] += 1
            try:
                with self.idle.request():
                    return await means.generate(request)
            finally:
                self._done["sampling"] += 1

        async def verify(rollout: Rollout) -> Rollout:
            return await self._judged(1, means.verify(rollout))

        async def verify_group(rollouts: Sequence[Rollout]) -> list[Rollout]:
            assert means.verify_group is not None
            judged: list[Rollout] = await self._judged(len(rollouts), means.verify_group(rollouts))
            return judged

        return dataclasses.replace(
            means, generate=generate, verify=verify, verify_group=verify_group if means.verify_group else None
        )

    async def _judged(self, count: int, judging: Any) -> Any:
        self._asked["verifying"] += count
        try:
            return await judging
        finally:
            self._done["verifying"] += count
