"""The sft stage: the likelihood of the tasks' demonstrations, through the same loop, records and learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr.errors import ConfigError, DataError, nearest
from rlvr.losses import Component, LikelihoodLoss, Objective
from rlvr.losses.tokens import Average
from rlvr.monitor.batch import batch_metrics
from rlvr.records import Batch, Origin, Task
from rlvr.registry import register
from rlvr.rollout import Collected
from rlvr.stage_plan import StagePlan
from rlvr.stages.base import Parts, Stage, token_weights
from rlvr.stages.demonstrations import demonstration, shown_length


@register("stage", "sft")
class SFTStage(Stage):
    """Supervised fine-tuning on demonstrations."""

    samples = False

    def __init__(
        self,
        plan: StagePlan,
        parts: Parts,
        tasks: Sequence[Task],
        seed: int,
        *,
        average: Average = "tokens",
        source_weights: dict[str, float] | None = None,
    ) -> None:
        """`source_weights`: the weight of the demonstrations of each source of tasks, above 0, and 1 for sources that it does not
        name (OpenChat, Wang et al. 2023, arXiv 2309.11235: exp(r / beta) for a source of reward r)."""
        self.source_weights = source_weights or {}
        known = {task.source for task in tasks}
        for source, weight in self.source_weights.items():
            if source not in known:
                named = sorted(s for s in known if s is not None)
                raise DataError(
                    f"stage {plan.name!r}: no task is of the source {source!r} of source_weights{nearest(source, named)}"
                )
            if not weight > 0:
                raise ConfigError(
                    f"stage {plan.name!r}: the weight of the source {source!r} is {weight}: it must be above 0"
                )
        self._objective = Objective((Component("likelihood", LikelihoodLoss(average), "likelihood"),))
        super().__init__(plan, parts, tasks, seed)

    def too_long(self, task: Task) -> str | None:
        """As for every stage; prompt and demonstration must fit together."""
        length, context = len(self.parts.prompt(task)) + shown_length(task, self.parts), self.parts.policy.context
        over = f"its prompt and demonstration have {length} tokens, the model's context is {context}"
        return super().too_long(task) or (over if length > context else None)

    def check_tasks(self) -> None:
        """DataError when a task has no demonstration."""
        for task in self.pool:
            if not task.demonstration:
                raise DataError(f"stage {self.plan.name!r}: task {task.id!r} has no demonstration to learn from")

    def collect(self, step: int) -> Collected:
        """The demonstrations of the next tasks, as rollouts that nobody sampled."""
        self._before = self.sampler.state_dict()
        draws = self.sampler.next(self.config.rollout.prompts_per_step)
        return Collected([demonstration(draw.task, self.parts, str(draw.number)) for draw in draws])

    def give_back(self) -> None:
        """Draw the same tasks again."""
        self.sampler.load_state_dict(self._before)

    def score(self, collected: Collected) -> tuple[Batch, dict[str, Any]]:
        """Weight 1, or that of its source, on every token of a demonstration."""
        batch = Batch(collected.rollouts)
        everyone = np.ones(len(batch), dtype=bool)
        weights = token_weights(batch.rollouts, Origin.DEMONSTRATION, everyone)
        factors = [np.float32(self.source_weights.get(str(r.task.source), 1.0)) for r in batch.rollouts]
        batch.token_columns["weight/likelihood"] = [f * w for f, w in zip(factors, weights, strict=True)]
        return batch, batch_metrics(batch)

    def objective(self) -> Objective:
        """The likelihood alone."""
        return self._objective
