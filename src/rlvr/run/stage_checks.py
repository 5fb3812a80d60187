"""Checks of a run's stages that need neither the model nor the engine: components, and tasks as they are written.

A start makes them first, so that a slip costs seconds; a dry run makes them too.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlvr import registry
from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan
from rlvr.core.specs import ComponentSpec
from rlvr.data import Template
from rlvr.data.sources import MissingDataError, is_here
from rlvr.errors import prefixed
from rlvr.evaluation.held_out import check_held_out
from rlvr.policy.loading import check_device
from rlvr.policy.scratch import check_architecture
from rlvr.run.run_tasks import TaskSets
from rlvr.verifiers import Verifier
from rlvr.verifiers.base import as_verifier

StageVerifiers = tuple[Verifier | None, dict[str, Verifier]]
"""The verifier of all tasks, None where tasks name their own, and the further ones by name."""


def check_stages(plans: Sequence[StagePlan], sets: TaskSets) -> None:
    """ConfigError or DataError for components that cannot be built or contradict the configuration, and for tasks that
    are written wrong."""
    model = plans[0].config.model
    check_device(model)
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
        with prefixed(f"verifiers.{name}: "):
            # By its key, where `as_verifier` would name that of the main one.
            if isinstance(written, ComponentSpec):
                registry.refuse_words("the verifier", written.name)
            others[name] = as_verifier(written)
    return own, others


def read_tasks(plans: Sequence[StagePlan], sets: TaskSets) -> None:
    """Read the tasks of all stages and check them. DataError for a row that is no task; ConfigError where evaluations
    are asked for and there are no tasks."""
    for number, plan in enumerate(plans):
        with _of_stage(number, plans):
            _check_read(plan, sets.training(plan.config))
            check_held_out(plan.config, bool(sets.evaluation(plan.config)), len(plans))


def read_tasks_here(plans: Sequence[StagePlan], sets: TaskSets, elsewhere: bool) -> list[str]:
    """Read the tasks that need neither the hub nor a function of the user's, as a dry run does, and return lines about
    all; raises as `read_tasks`.

    `elsewhere`: files may be on another machine, or be made before the run. One that is missing is then said.
    """
    # A mapping keeps the order, and each line once.
    lines: dict[str, None] = {}
    for number, plan in enumerate(plans):
        stage = f" of stage {number + 1}" if len(plans) > 1 else ""
        with _of_stage(number, plans):
            train = _read_here("train", plan, sets, sets.training, elsewhere, lines, stage)
            if train is not None:
                _check_read(plan, train)
            check_held_out(plan.config, bool(sets.written("eval", plan.config)[1]), len(plans))
            _read_here("eval", plan, sets, sets.evaluation, elsewhere, lines, stage)
    return list(lines)


def _read_here(
    split: str,
    plan: StagePlan,
    sets: TaskSets,
    read: Callable[[Config], list[Any]],
    elsewhere: bool,
    lines: dict[str, None],
    stage: str,
) -> list[Any] | None:
    """Read the tasks of a split where that can be done here, and add the line about them; None where it cannot."""
    key, spec = sets.written(split, plan.config)
    if spec is None:
        return None
    if not is_here(spec, plan.config.data.fields):
        lines[f"{key}{stage}: not read by a dry run ({reprlib.repr(spec)})"] = None
        return None
    try:
        tasks = read(plan.config)
    except MissingDataError as error:
        if not elsewhere:
            raise
        lines[f"{error} (the run needs it)"] = None
        return None
    lines[f"{key}{stage}: {len(tasks)} tasks"] = None
    return tasks


def _check_read(plan: StagePlan, tasks: Sequence[Any]) -> None:
    registry.find("stage", plan.kind).check_read(plan, tasks)


def _of_stage(number: int, plans: Sequence[StagePlan]) -> contextlib.AbstractContextManager[None]:
    """Name the stage in errors, where there are several: the key may be one of the stage or of the whole run."""
    return prefixed(f"stage {number + 1} ({plans[number].name}): ") if len(plans) > 1 else contextlib.nullcontext()
