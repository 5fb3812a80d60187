"""Checks of a run's stages that need neither the model nor the engine: components, and tasks as they are written.

A start makes them first, so that a slip costs seconds; a dry run makes them too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rlvr import registry
from rlvr.config.stage_plan import StagePlan
from rlvr.data.sources import MissingDataError, only_files
from rlvr.errors import prefixed
from rlvr.evaluation.held_out import check_held_out
from rlvr.run.run_tasks import TaskSets


def check_stages(plans: Sequence[StagePlan], sets: TaskSets) -> None:
    """ConfigError or DataError for components that cannot be built or contradict the configuration, and for tasks that
    are written wrong."""
    for number, plan in enumerate(plans):
        with _of_stage(number, plans):
            # `find`, not `build`: a stage takes what only a run has beside its options.
            registry.find("stage", plan.kind).check_plan(plan)
            sets.check_written(plan.config)


def read_tasks(plans: Sequence[StagePlan], sets: TaskSets) -> None:
    """Read the tasks of all stages. DataError for a row that is no task; ConfigError where evaluations are asked for
    and there are no tasks."""
    for number, plan in enumerate(plans):
        with _of_stage(number, plans):
            check_held_out(plan.config, bool(sets.evaluation(plan.config)), len(plans))
            sets.training(plan.config)


def read_files(plans: Sequence[StagePlan], sets: TaskSets, elsewhere: bool) -> list[str]:
    """Read the tasks that are in files, as a dry run does, and return lines about them; raises as `read_tasks`.

    `elsewhere`: the files may be on another machine, or be made before the run. One that is missing is then said.
    """
    # A mapping keeps the order, and each line once.
    lines: dict[str, None] = {}
    for number, plan in enumerate(plans):
        with _of_stage(number, plans):
            check_held_out(plan.config, bool(sets.written("eval", plan.config)[1]), len(plans))
            for split, read in (("train", sets.training), ("eval", sets.evaluation)):
                key, spec = sets.written(split, plan.config)
                if spec is None:
                    continue
                if not only_files(spec):
                    lines[f"{key}: not read by a dry run ({spec!r})"] = None
                    continue
                try:
                    lines[f"{key}: {len(read(plan.config))} tasks"] = None
                except MissingDataError as error:
                    if not elsewhere:
                        raise
                    lines[f"{error}. The run needs it"] = None
    return list(lines)


def _of_stage(number: int, plans: Sequence[StagePlan]) -> contextlib.AbstractContextManager[None]:
    return prefixed(f"stages[{number}]: ") if len(plans) > 1 else contextlib.nullcontext()
