"""Steps of a grpo stage that learn demonstrations alone: drawn by chance (SASR), or when whole groups failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvr.config import Config, SupervisedStepsConfig
from rlvr.core.seeding import seed_of
from rlvr.data import Sampler
from rlvr.errors import ConfigError
from rlvr.losses import Objective
from rlvr.records import Batch, Task
from rlvr.stages.grpo.failed_tasks import FailedTasks


class SupervisedSteps:
    """Draws the kind of each step and remembers the norms of the supervised gradients.

    p = G / (G + gamma G_w): G is the norm of the last step that learned demonstrations, G_w that of the last step of
    the warm-up, both before clipping.
    """

    def __init__(self, config: SupervisedStepsConfig, seed: int) -> None:
        self.config = config
        self._warmup = config.warmup or 0
        self._seed = seed
        self._last: float | None = None
        self._warm: float | None = None

    def probability(self, step: int) -> float:
        """The probability that `step` of the stage, counted from 0, learns demonstrations; 1 in the warm-up."""
        # Without a norm, after a warm-up whose gradients were not finite, it goes on.
        if step < self._warmup or self._last is None or self._warm is None:
            return 1.0
        total = self._last + self.config.gamma * self._warm
        # Both norms are 0 where every demonstration is learned: nothing is left to imitate.
        return self._last / total if total else 0.0

    def drawn(self, step: int) -> bool:
        """True where `step` learns demonstrations; the same each time it is asked for a step."""
        chance = np.random.default_rng(seed_of(self._seed, "supervised step", step)).random()
        return bool(chance < self.probability(step))

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in the gradient norm of a step that learned demonstrations."""
        norm = metrics.get("grad_norm")
        if norm is None or not np.isfinite(norm):
            return
        self._last = float(norm)
        if step < self._warmup:
            self._warm = float(norm)

    def take(self, sampler: Sampler, count: int) -> list[tuple[str, Task]]:
        """The next tasks, each with the key of its group."""
        return [(str(draw.number), draw.task) for draw in sampler.next(count)]

    def look(self, batch: Batch) -> None:
        """Take in nothing of a scored step: only norms decide."""

    def roll_back(self) -> None:
        """Keep the norms, which a step gives only when it is trained."""

    def state_dict(self) -> dict[str, Any]:
        """The norms."""
        return {"last": self._last, "warm": self._warm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the norms of a checkpoint."""
        self._last = state["last"]
        self._warm = state["warm"]


def supervision(config: SupervisedStepsConfig, seed: int, tasks: Sequence[Task]) -> SupervisedSteps | FailedTasks:
    """Return the rule for which steps learn demonstrations, and whose."""
    if config.gather is not None:
        return FailedTasks(config, tasks)
    return SupervisedSteps(config, seed)


def check_supervised_steps(config: Config, objective: Objective) -> None:
    """ConfigError where no term learns demonstrations, or steps are sampled before their kind can be known."""
    if config.algorithm.supervised_steps is None:
        return
    if not any(component.loss.shows_demonstrations for component in objective.components):
        raise ConfigError(
            "algorithm.supervised_steps draws steps that learn demonstrations, and no term learns them: add {name: "
            "likelihood, on: demonstrations} to algorithm.auxiliary"
        )
    if config.rollout.staleness:
        raise ConfigError(
            "algorithm.supervised_steps chooses the kind of a step by those before it, and "
            "rollout.staleness samples steps ahead: set rollout.staleness to 0"
        )
