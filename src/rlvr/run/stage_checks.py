"""Checks of a run's stages that need neither the model nor the engine: components, verifiers and tasks.

A start makes them first, so that a slip costs seconds; a dry run makes them too.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlvr import registry
from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan
from rlvr.core.specs import ComponentSpec
from rlvr.data import Template
from rlvr.data.sources import MissingDataError, is_here
from rlvr.errors import ConfigError, prefixed
from rlvr.evaluation.held_out import check_held_out
from rlvr.policy.loading import check_device
from rlvr.policy.scratch import check_architecture
from rlvr.records import Task
from rlvr.run.run_tasks import TaskSets
from rlvr.verifiers import Verifier
from rlvr.verifiers.base import as_verifier
from rlvr.verifiers.unverifiable import problem_of, refuse_unverifiable, without_verifier

StageVerifiers = tuple[Verifier | None, dict[str, Verifier]]
"""The verifier of all tasks, None where tasks name their own, and the further ones by name."""


def check_stages(plans: Sequence[StagePlan], sets: TaskSets) -> None:
    """ConfigError or DataError for components that cannot be built or contradict the configuration, and for tasks that
    are written wrong."""
    model = plans[0].config.model
    check_device(model)
    for name, frozen in plans[0].config.models.items():
        check_device(frozen, f"models.{name}")
    if model.scratch is not None:
        check_architecture(model.scratch)
    for number, plan in enumerate(plans):
        with _of_stage(number, plans):
            # `find`, not `build`: a stage takes what only a run has beside its options.
            registry.find("stage", plan.kind).check_plan(plan)
            with prefixed("data.template: "):
                Template.parse(plan.config.data.template)
            sets.check_written(plan.config)


def make_verifiers(
    plans: Sequence[StagePlan], given: Any = None, named: Mapping[str, Any] = MappingProxyType({})
) -> list[StageVerifiers]:
    """Build the verifiers of each stage; `given` stands in the place of `verifier`, `named` in that of the `verifiers`
    of these names. ConfigError names the key of one that cannot be had."""
    made = []
    for number, plan in enumerate(plans):
        with _of_stage(number, plans):
            made.append(verifiers_of(plan.config, given, named))
    return made


def verifiers_of(config: Config, given: Any = None, named: Mapping[str, Any] = MappingProxyType({})) -> StageVerifiers:
    """Build the verifiers of a configuration, as `make_verifiers` those of stages."""
    main = config.verifier if given is None else given
    with prefixed("" if given is not None else "verifier: "):
        own = None if main is None else as_verifier(main)
    others = {}
    for name, written in {**config.verifiers, **named}.items():
        # By its key, where `as_verifier` would name that of the main one.
        if isinstance(written, ComponentSpec):
            registry.refuse_words(f"verifiers.{name}", written.name)
        with prefixed(f"verifiers.{name}: "):
            others[name] = as_verifier(written)
    return own, others


def read_tasks(
    plans: Sequence[StagePlan], sets: TaskSets, verifiers: Sequence[StageVerifiers], verifies: bool = True
) -> None:
    """Read the tasks of all stages and check them; `verifiers` are those of the stages, and look at the tasks where
    this process `verifies`.

    DataError for a row that is no task and for a task that cannot be verified; ConfigError where evaluations are asked
    for and there are no tasks.
    """
    for number, (plan, judges) in enumerate(zip(plans, verifiers, strict=True)):
        with _of_stage(number, plans):
            training = sets.training(plan.config)
            registry.find("stage", plan.kind).check_read(plan, training)
            held_out = sets.evaluation(plan.config)
            check_held_out(plan.config, bool(held_out), len(plans))
            if verifies:
                _check_verifiable([*_verified(plan, training), *held_out], judges)


def read_tasks_here(
    plans: Sequence[StagePlan], sets: TaskSets, verifiers: Sequence[StageVerifiers], elsewhere: bool
) -> list[str]:
    """Read the tasks that need neither the hub nor a function of the user's, as a dry run does, and return lines about
    all; raises as `read_tasks`.

    `elsewhere`: files may be on another machine, or be made before the run. One that is missing is then said.
    """
    # A mapping keeps the order, and each line once.
    lines: dict[str, None] = {}
    for number, (plan, judges) in enumerate(zip(plans, verifiers, strict=True)):
        stage = f" of stage {number + 1}" if len(plans) > 1 else ""
        with _of_stage(number, plans):
            said, training = _read_here("train", plan.config, sets, elsewhere, stage)
            if training is not None:
                registry.find("stage", plan.kind).check_read(plan, training)
            check_held_out(plan.config, bool(sets.written("eval", plan.config)[1]), len(plans))
            of_held_out, held_out = _read_here("eval", plan.config, sets, elsewhere, stage)
            lines |= dict.fromkeys([*said, *of_held_out])
            # A verifier's ConfigError is about what this machine lacks, such as the key of a service.
            with contextlib.suppress(_LackingError):
                _check_verifiable([*_verified(plan, training or ()), *(held_out or ())], judges)
    return list(lines)


def _read_here(
    split: str, config: Config, sets: TaskSets, elsewhere: bool, stage: str
) -> tuple[list[str], list[Task] | None]:
    """The line about the tasks of a split, none where there are none, and the tasks; None where they cannot be read
    here."""
    key, spec = sets.written(split, config)
    if spec is None:
        return [], None
    if not is_here(spec, config.data.fields):
        return [f"{key}{stage}: not read by a dry run ({reprlib.repr(spec)})"], None
    try:
        tasks = sets.training(config) if split == "train" else sets.evaluation(config)
    except MissingDataError as error:
        if not elsewhere:
            raise
        return [f"{error} (the run needs it)"], None
    return [f"{key}{stage}: {len(tasks)} tasks"], tasks


class _LackingError(ConfigError):
    """Something that a verifier needs is missing on this machine, which no task is at fault for."""


def _verified(plan: StagePlan, tasks: Sequence[Task]) -> Sequence[Task]:
    """The training tasks of a stage that have to be such as its verifiers can check."""
    # A task that is too long may be left out, which the tokenizer decides; recorded rollouts have their verdicts.
    left_out = plan.config.data.skip_long_prompts or plan.config.rollout.engine.name == "recorded"
    return tasks if registry.find("stage", plan.kind).verifies and not left_out else ()


def _check_verifiable(tasks: Sequence[Task], verifiers: StageVerifiers) -> None:
    """DataError for tasks that no verifier checks, or that the verifiers cannot check; ConfigError for a verifier that
    a task names and that is not there. The stage looks again, once it has the models that verifiers ask."""
    own, named = verifiers
    for name in dict.fromkeys(task.verifier for task in tasks if own is None):
        if name is None:
            raise without_verifier(next(task for task in tasks if task.verifier is None))
        registry.check_options("verifier", name)
    by_name = [(verifier, name) for name, verifier in named.items()]
    try:
        bad = [(task, problem) for task in tasks if (problem := problem_of(task, own, by_name)) is not None]
    except ConfigError as error:
        raise _LackingError(str(error)) from error
    refuse_unverifiable(bad)


def _of_stage(number: int, plans: Sequence[StagePlan]) -> contextlib.AbstractContextManager[None]:
    """Name the stage in errors, where there are several: the key may be one of the stage or of the whole run."""
    return prefixed(f"stage {number + 1} ({plans[number].name}): ") if len(plans) > 1 else contextlib.nullcontext()
