"""Responses to a sample of a stage's tasks, for rewards that measure the policy now and then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rlvr.components import Monitoring
from rlvr.config import RolloutConfig
from rlvr.core.seeding import seed_of
from rlvr.data import Draw
from rlvr.records import Rollout, Task
from rlvr.rollout import Collector, RolloutContext, evaluation_plan


class MonitoringSampler:
    """Samples and verifies the responses of a stage's monitorings, on rank 0.

    The tasks of each are drawn once, from the run's seed, and may be trained on as well. Responses have the length,
    temperature and stop strings of the step. `contexts(step)` is the context of the step's plans.
    """

    def __init__(
        self,
        monitorings: Sequence[Monitoring],
        tasks: Sequence[Task],
        config: RolloutConfig,
        collector: Collector,
        contexts: Callable[[int], RolloutContext],
        seed: int,
    ) -> None:
        self.config = config
        self.collector = collector
        self.contexts = contexts
        self._sets = [(one, _drawn(tasks, one.tasks, seed_of(seed, "monitoring", one.tasks))) for one in monitorings]

    def collect(self, step: int) -> list[tuple[Monitoring, list[Rollout]]]:
        """The responses that are due before `step`; raises as `Collector.collect` does."""
        plan = evaluation_plan(self.config.plan)
        collected = []
        for monitoring, tasks in self._sets:
            if step % monitoring.every:
                continue
            context = self.contexts(step)
            # Other seeds than those of the draws that train, and new ones each time.
            path = (*context.seed_path, "monitoring", step)
            context = dataclasses.replace(context, group_size=monitoring.samples, seed_path=path)
            draws = [Draw(number, task) for number, task in enumerate(tasks)]
            collected.append((monitoring, self.collector.collect(draws, plan, context, self.config.deadline)))
        return collected


def _drawn(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """`count` of the tasks in random order, or all of them."""
    order = np.random.default_rng(seed).permutation(len(tasks))
    return [tasks[int(i)] for i in order[:count]]
