"""The stages of a run, opened with their tasks checked, so that bad tasks are refused before time is spent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlvr import registry
from rlvr.core.seeding import seed_of
from rlvr.errors import ConfigError
from rlvr.evaluation.held_out import check_lengths
from rlvr.rollout import Sampling
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.reporting import Reporting
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_tasks import RunTasks, encoded_lengths
from rlvr.stages import Stage, StageContext
from rlvr.stages.grpo.scoring import chooser


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
    number: int,
    resolved: ResolvedConfig,
    training: PolicyTraining,
    rollouts: RolloutRuntime,
    tasks: RunTasks,
    reporting: Reporting,
) -> Stage:
    """Open a stage of a run. DataError or ConfigError where its tasks do not fit; a message of tasks that are left
    out goes to the console."""
    plan = resolved.plans[number]
    config = plan.config
    is_main = rollouts.world.is_main
    verification = rollouts.verifications[number]
    prompts = tasks.prompts.under(config.data.template)
    sampling = Sampling(config.rollout.max_new_tokens)  # the stage sets that of each step
    rollout_context = rollouts.rollout_context(
        verification, prompts, sampling, config.rollout.group_size, "rollout", number
    )
    context = StageContext(
        policy=training.policy,
        history=rollouts.history,
        prompt=prompts,
        lengths=partial(encoded_lengths, prompts, rollouts.world),
        collector=rollouts.collector,
        rollout_context=rollout_context,
        longest_sequence=rollouts.context,
        shares_weights=rollouts.engine.shares_weights,
        is_main=is_main,
    )
    # `find`, not `build`: a stage takes its context beside the options, which `stage_plans` has checked.
    make = registry.find("stage", plan.kind)
    # By number: two stages on the same tasks draw them in different orders.
    seed = seed_of(config.run.seed, number, "sampler")
    stage: Stage = make(plan, context, tasks.training(config), seed, **plan.options)
    if stage.left_out:
        reporting.console.message(f"stage {plan.name}: {stage.left_out} tasks are left out, they are too long")
    _check_context(stage, rollouts.context, reporting)
    # Rank 0 alone verifies, so it alone needs what the check looks for, such as a sandbox.
    if stage.verifies and is_main:
        verification.check(stage.pool)
    held_out = tasks.evaluation(config)
    lengths = encoded_lengths(prompts, rollouts.world, held_out)[0]
    # Before the first step: evaluation tasks that fail at the end of a stage would cost the whole stage.
    warn = partial(reporting.console.message, level="warning")
    check_lengths(config, held_out, lengths, rollouts.context, warn)
    chooser(config, training.policy, held_out, training.partitions)  # refuses tasks that it cannot score
    if is_main:
        verification.check(held_out)
    if number + 1 == len(resolved.plans):
        rollouts.warn_of_unused_models(reporting.console.message)
    return stage


def _check_context(stage: Stage, context: int, reporting: Reporting) -> None:
    """ConfigError where no response of a stage can have `rollout.max_new_tokens`, unless it is accepted; a warning
    where some cannot."""
    wanted = stage.config.rollout.max_new_tokens
    # A prompt that is longer than others ends its responses sooner, which is no reason to lower the bound of all. A
    # bound that no response can reach is a slip: the constant average and penalties on length would go by it.
    never = stage.samples and stage.longest_response < wanted
    if never and not stage.config.rollout.accept_short_context:
        raise ConfigError(
            f"stage {stage.plan.name!r}: rollout.max_new_tokens is {wanted}, and a context of {context} tokens (the "
            f"smaller one of the model's and the engine's) leaves at most {stage.longest_response} after the shortest "
            f"prompt: set rollout.max_new_tokens to {stage.longest_response} or less, give the model a longer context "
            "(model.override_config), or accept it (rollout.accept_short_context=true)"
        )
    if stage.cut_responses:
        reporting.console.message(
            f"stage {stage.plan.name}: a context of {context} tokens leaves fewer than "
            f"rollout.max_new_tokens={wanted} for responses to {stage.cut_responses} of {len(stage.pool)} tasks, which "
            f"end there, at most after {min(stage.longest_response, wanted)} tokens: set it lower, or give the model a "
            "longer context (model.override_config)",
            "warning",
        )
