"""The stages of a run, opened with their tasks checked, so that bad tasks are refused before time is spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlvr import registry
from rlvr.config.stage_plan import StagePlan
from rlvr.core.seeding import seed_of
from rlvr.evaluation.held_out import check_held_out
from rlvr.rollout import RolloutContext
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_tasks import RunTasks
from rlvr.stages import Parts, Stage
from rlvr.stages.choosing import chooser


class StageList(list[Stage]):
    """The stages of a run in order, saved and loaded as one."""

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each stage."""
        return [stage.state_dict() for stage in self]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Take back the state of each stage. CheckpointError where a stage's tasks are others."""
        for stage, saved in zip(self, state, strict=True):
            stage.load_state_dict(saved)


def open_stage(
    plan: StagePlan,
    number: int,
    count: int,
    training: PolicyTraining,
    rollouts: RolloutRuntime,
    tasks: RunTasks,
    context: RolloutContext,
    leads: bool,
    report: Callable[[str], None],
) -> Stage:
    """Open stage `number` of `count`. DataError or ConfigError where its tasks or those that it is evaluated on do not fit."""
    config = plan.config
    seed = seed_of(config.run.seed, number, "sampler")
    prompts = tasks.prompts.under(config.data.template)
    lengths = partial(tasks.lengths, prompts)
    parts = Parts(
        training.policy,
        rollouts.history,
        prompts,
        lengths,
        rollouts.collector,
        context,
        rollouts.context,
        rollouts.engine.shares_weights,
        leads,
    )
    make = registry.find("stage", plan.kind)
    stage: Stage = make(plan, parts, tasks.training(config), seed, **plan.options)
    if stage.left_out:
        report(f"stage {plan.name}: {stage.left_out} tasks are left out, they are too long")
    verification = rollouts.verifications[number]
    if stage.verifies and leads:
        verification.check(stage.pool)
    held_out = tasks.evaluation(config)
    check_held_out(config, held_out, lengths(held_out)[0], rollouts.context, count)
    chooser(config, training.policy, held_out, training.partitions)  # refuses tasks that it cannot score
    if leads:
        verification.check(held_out)
    return stage
