"""SCoRe: each of two attempts is credited with its own reward, and the second one with its progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.advantages.group import decided, group_advantage
from rlvr.components import Advantage
from rlvr.config import Config
from rlvr.core.schedules import Scalar
from rlvr.errors import ConfigError, nearest
from rlvr.records import Batch, Task
from rlvr.registry import register


@register("advantage", "attempts")
@dataclass(frozen=True)
class AttemptAdvantage(Advantage):
    """r1 at the tokens of turn 1 and r2 + bonus (r2 - r1) at those of turn 2, each minus the mean of the same number
    over the group's other members.

    SCoRe (Kumar et al. 2024, arXiv 2409.12917, eq. 3 to 5): the discount between the attempts is 0, so that the first
    one is not paid for the second one's reward, nor charged for the bonus that it takes from it. A conversation without
    a turn has no part in that turn's mean. Tokens of other turns, and of undecided conversations, have 0.
    """

    second: str = "second"
    """The reward term with the second attempt's reward, r2."""
    first: str | None = None
    """The term with the first one's, r1; null: the first attempt has no advantage and there is no bonus (stage I)."""
    bonus: Scalar = 0.0
    """Weight of the progress r2 - r1 in the second attempt's reward, at least 0 (the paper's alpha)."""

    per_token = True
    smallest_group: ClassVar = 2

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where there is no such reward, or a bonus without a first attempt to compare with."""
        names = [term.column for term in config.rewards]
        for name in filter(None, (self.first, self.second)):
            if name not in names:
                raise ConfigError(
                    f"algorithm.advantage: attempts reads the term {name!r}, and there is no such term in "
                    f"`rewards`{nearest(name, names)}"
                )
        if self.first is None and self.bonus != 0.0:
            raise ConfigError(
                "algorithm.advantage: the bonus of attempts compares the second attempt with the first, and `first` is "
                "null: name the first attempt's term, or set bonus to 0"
            )

    def __call__(self, batch: Batch) -> list[np.ndarray]:
        # As where a selector leaves no group: there may be no columns either.
        if not len(batch):
            return []
        second = batch.column(f"reward/{self.second}")
        if self.first is None:
            rewards = [np.zeros(len(batch)), second]
        else:
            first = batch.column(f"reward/{self.first}")
            rewards = [first, second + float(self.bonus) * (second - first)]
        on = decided(batch)
        groups = batch.group_index()
        turns = [[s for s in rollout.segments if s.kind == "turn"] for rollout in batch.rollouts]
        # float64 [2, B]: each attempt against the same attempt of the other conversations.
        advantages = [
            group_advantage(
                np.where(on & np.asarray([len(t) > number for t in turns]), reward, np.nan),
                groups,
                "leave_one_out",
                "none",
            )
            for number, reward in enumerate(rewards)
        ]
        result = []
        for i, rollout in enumerate(batch.rollouts):
            values = np.zeros(len(rollout))
            for turn, advantage in zip(turns[i], advantages, strict=False):
                values[turn.start : turn.end] = advantage[i]
            result.append(np.where(rollout.sampled, values, 0.0))
        return result
