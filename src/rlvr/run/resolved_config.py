"""The configuration of a run as it stands on this machine: `auto` replaced by values, and the stages with their
steps; and what a checkpoint has to fit: engine, configuration and evaluation tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlvr.config import Config
from rlvr.config.renamed_keys import with_new_names
from rlvr.config.stage_plan import StagePlan, set_steps_of_epochs, stage_plans
from rlvr.core.specs import ComponentSpec
from rlvr.core.startup_lines import startup
from rlvr.data.samplers import fingerprint_of
from rlvr.distributed import World
from rlvr.distributed.gpu_checks import check_gpus
from rlvr.errors import CheckpointError, ConfigError
from rlvr.monitor.console import Level
from rlvr.planner import RunPlan, automatic_keys, engine_of_run, plan_resumed, plan_run, put_values
from rlvr.policy import Policy
from rlvr.policy.loading import set_checkpointing
from rlvr.run.dry_run import plan_lines
from rlvr.run.run_folder import RunFolder
from rlvr.run.run_tasks import RunTasks, TaskSets
from rlvr.run.stage_checks import StageVerifiers, check_stages, make_verifiers, read_tasks
from rlvr.run.trainer_arguments import TrainerArguments

MOVED = ("url", "key", "device", "batch_tokens")
"""Keys of a frozen model that say where it is asked, and not which one it is."""


@dataclass
class ResolvedConfig:
    """A configuration without `auto`, and how it was found."""

    config: Config
    plans: list[StagePlan]
    memory_plan: RunPlan
    engine_reason: str | None
    """The reason for the engine that `rollout.engine: auto` took; None where the configuration names the engine."""
    resume: str | None
    """The checkpoint or run that the configuration was resolved to go on from, as the trainer was given it."""
    verifiers: list[StageVerifiers]
    """The verifiers of each stage."""

    @property
    def steps(self) -> int:
        """Steps of the run, over all stages."""
        return sum(plan.allowed for plan in self.plans)

    @property
    def automatic_keys(self) -> list[str]:
        """Keys that the configuration, as it was written, leaves to the memory plan."""
        return automatic_keys(self.memory_plan.written)

    def lines(self, longest: Sequence[int]) -> list[str]:
        """The run in words: folder, stages, the reason for the engine, memory. `longest`: for each stage the tokens
        that the context leaves for a response."""
        planned = plan_lines(self.config, self.plans, self.config.folder, longest)
        return [*planned, *filter(None, [self.engine_reason]), self.memory_plan.brief]

    def check_engine(self, saved: Any) -> None:
        """CheckpointError where `rollout.engine: auto` took another engine than `saved`, that of the checkpoint."""
        # Another engine rounds otherwise, which is a change of the configuration that nobody asked for.
        if self.engine_reason is not None and ComponentSpec.parse(saved) != self.config.rollout.engine:
            raise CheckpointError(
                f"the checkpoint was made with rollout.engine {saved!r}, and here {self.engine_reason}. Set "
                "rollout.engine, or give `resume` to GRPOTrainer itself, which then takes the checkpoint's engine"
            )

    def take_saved_values(
        self, saved: Mapping[str, Any], world: World, policy: Policy, report: Callable[[str, Level], None]
    ) -> None:
        """Take the values that `auto` has in `saved`, a checkpoint's configuration, where these fit here.

        `report` is told, as (text, level), which were replaced. Config objects are changed in place: the stages share
        them.
        """
        self.memory_plan = plan_resumed(self.memory_plan, world, saved)
        # The model is loaded by now, under the value that was planned for this machine.
        before = self.config.model.gradient_checkpointing
        # In place: learner and stages hold these objects already.
        put_values(self.memory_plan.config, self.config, self.plans)
        if self.config.model.gradient_checkpointing != before:
            set_checkpointing(policy.model, self.config.model.gradient_checkpointing is True)
        if self.memory_plan.notice is not None:
            report(self.memory_plan.notice, "warning")


def resolved_config(given: TrainerArguments, world: World, resume: str | None, sets: TaskSets) -> ResolvedConfig:
    """Resolve a configuration for the devices of all ranks. ConfigError, the same on every rank, where it cannot work.

    `given` are the configuration and the objects in the place of parts of it. `sets` are the tasks, which `run.epochs`
    counts. Verifiers are built and tasks are read here, so that bad ones are refused before a model is loaded.
    """
    config = given.config
    startup.info("planning: devices, engine and memory")
    saved = None
    if world.is_main:
        folder = RunFolder(config)
        try:
            folder.check_place()
        except ConfigError as error:  # the other ranks wait for the engine
            world.fail(error)
            raise
        # Before the engine is chosen: `auto` takes that of the checkpoint where this machine has it.
        if resume is not None:
            saved = folder.saved_engine(resume)
    written = stage_plans(config)
    try:
        check_stages(written, sets)
        verifiers = make_verifiers(written, given.verifier, given.verifiers)
        read_tasks(written, sets, verifiers, verifies=world.is_main)
    except BaseException as error:  # a file may be missing on one machine alone, and the other ranks would wait
        world.fail(error)
        raise
    config, engine_reason = engine_of_run(config, world, saved)
    check_gpus(config, world, engine_reason)
    memory_plan = plan_run(config, world, given.model, given.eval_tasks)
    plans = stage_plans(memory_plan.config)
    if (epochs := config.run.epochs) is not None:
        set_steps_of_epochs(plans, epochs, lambda of_stage: len(sets.training(of_stage)))
    return ResolvedConfig(memory_plan.config, plans, memory_plan, engine_reason, resume, verifiers)


@dataclass
class RunIdentity:
    """Writes these facts into checkpoints, and checks a checkpoint by them. (Stages check their own training tasks.)"""

    resolved: ResolvedConfig
    tasks: RunTasks
    folder: RunFolder
    models: Callable[[], Mapping[str, Any]]
    """The frozen models, on rank 0: name -> where it is from."""

    def state_dict(self) -> dict[str, Any]:
        """The facts, under the names of the checkpoint format."""
        return {
            "evaluated_on": self._evaluated_on,
            "config": self.resolved.config.dump(),
            "recorded": self.folder.given.tree,
        }

    def check(
        self, state: Mapping[str, Any], world: World, policy: Policy, report: Callable[[str, Level], None]
    ) -> None:
        """CheckpointError where the state of a checkpoint is of another run. Values of `auto` are taken over
        from it.

        `report` is told, as (text, level), of values that do not fit here.
        """
        # A checkpoint of the version before has keys under their old names.
        config = with_new_names(state["config"])
        self.resolved.check_engine(config["rollout"]["engine"])
        # Before the comparison of configurations: values that `auto` takes here may differ from those in the
        # checkpoint.
        self.resolved.take_saved_values(config, world, policy, report)
        # A frozen model may be elsewhere by now; which one it is may not change.
        moved = [f"models.{name}.{key}" for name in self.resolved.config.models for key in MOVED]
        free = [*self.resolved.automatic_keys, *moved]
        self.folder.check(config, with_new_names(state.get("recorded", config)), free)
        self._check_evaluation_tasks(state["evaluated_on"])

    def check_models(self, saved: Mapping[str, Any], world: World) -> None:
        """CheckpointError, on every rank, where a frozen model is not the one of the manifest's `saved`."""
        problem = None
        if world.is_main:
            now = self.models()
            for name, before in saved.items():
                known = before.get("config_hash"), now.get(name, {}).get("config_hash")
                if None not in known and known[0] != known[1]:
                    problem = (
                        f"models.{name}: the checkpoint was made with another model (the SHA-256 of its config.json "
                        f"was {known[0]}, and is {known[1]} now): put that model back"
                    )
        problem = world.broadcast(problem, "the frozen models of the checkpoint")
        if problem is not None:
            raise CheckpointError(problem)

    def _check_evaluation_tasks(self, saved: list[str]) -> None:
        """CheckpointError where the evaluation tasks are others, and that was not accepted."""
        if self.resolved.config.checkpoint.accept_changed_data:
            return
        for plan, before, now in zip(self.resolved.plans, saved, self._evaluated_on, strict=True):
            if before != now:
                raise CheckpointError(
                    f"the checkpoint was made with other evaluation tasks (stage {plan.name!r}: fingerprint {before}, "
                    f"now {now}): its results would not be comparable. Put the data back, or set "
                    "checkpoint.accept_changed_data=true"
                )

    # Kept: it goes through the text of every task, and each checkpoint asks for it.
    @cached_property
    def _evaluated_on(self) -> list[str]:
        """Fingerprints of the stages' evaluation tasks."""
        return [fingerprint_of(self.tasks.evaluation(plan.config)) for plan in self.resolved.plans]
