"""The memory plan of a run at its start: the values that `auto` takes, the same on every rank, and the refusal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.config import Config, OptimConfig
from rlvr.distributed import World
from rlvr.errors import ConfigError
from rlvr.planner.devices import Devices, own_devices
from rlvr.planner.planner import UNDESCRIBED, Planner, substituted
from rlvr.planner.report import gib, plan_lines, refusal
from rlvr.rollout.automatic import with_engine
from rlvr.stage_plan import StagePlan, stage_plans

UNKNOWN_TOKENS = 8192
"""Tokens of a micro-batch on a GPU where a model cannot be described, with gradient checkpointing."""


@dataclass(frozen=True)
class RunPlan:
    """A configuration without `auto`, and what was found on the way to it."""

    config: Config
    written: Config
    """The configuration as it was, with `auto`."""
    lines: tuple[str, ...]
    """The plan in words."""
    brief: str
    """The same in a line."""
    problem: str | None
    """The reason why it cannot fit, and what would."""


def plan_run(config: Config, world: World, model: Any = None) -> RunPlan:
    """The plan of a run on the devices of its ranks; `model` is one that is loaded already.

    ConfigError, the same on every rank, where it cannot fit and `run.check_memory` is set.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = own_devices(config.model, world.size, ranks_here)
    smallest = min(world.gather(own.memory, "the memory of the devices"))
    planner = Planner(replace(own, memory=smallest), world.size, model)
    found = world.broadcast(_plan(config, planner) if world.leads else None, "the memory plan")
    assert found is not None
    if found.problem is not None and config.run.check_memory:
        raise ConfigError(f"the run {found.problem}. Or set run.check_memory=false, and it is only said")
    return found


def plan_for(config: Config, devices: Devices, ranks: int | None = None) -> RunPlan:
    """The plan of a run on devices; without `ranks` these need not be here, and engines leave some to train on."""
    config, reason = with_engine(config, devices.on_gpu, here=ranks is not None)
    if reason is not None:
        plan = plan_for(config, devices, ranks)
        return replace(plan, lines=(reason, *plan.lines))
    return _plan(config, Planner(devices, ranks))


def keep_saved(plan: RunPlan, stages: Sequence[StagePlan], saved: Mapping[str, Any]) -> bool:
    """Put what a checkpoint's configuration `saved` has in the place of the values that were chosen for this start, so that the run
    goes on as it was. The result says whether gradient checkpointing changed."""
    written = plan.written
    before = plan.config.model.gradient_checkpointing
    if written.model.gradient_checkpointing == "auto":
        plan.config.model.gradient_checkpointing = saved["model"].get("gradient_checkpointing", before)
    if written.optim.micro_batch_tokens == "auto":
        _keep_tokens(plan.config.optim, saved["optim"])
    for stage in stages:
        stage.config.model.gradient_checkpointing = plan.config.model.gradient_checkpointing
    for stage, asked in zip(stages, stage_plans(written), strict=True):
        if asked.config.optim.micro_batch_tokens == "auto":
            _keep_tokens(stage.config.optim, saved["optim"])
    return before != plan.config.model.gradient_checkpointing


def _keep_tokens(optim: OptimConfig, saved: Mapping[str, Any]) -> None:
    if saved.get("micro_batch_size") is None:
        optim.micro_batch_tokens = saved.get("micro_batch_tokens")


def _plan(config: Config, planner: Planner) -> RunPlan:
    """The plan, and the configuration with what it chose."""
    written = stage_plans(config)
    stages = planner.placed(written)
    try:
        resolved = planner.resolved(stages)
        plans = planner.plans(resolved)
    except UNDESCRIBED as error:
        if isinstance(error, ConfigError) and planner.ranks is None:
            raise
        return _undescribed(config, planner, error)
    lines = plan_lines(resolved, plans)
    worst = min((plan.worst for plan in plans), key=lambda phase: phase.left)
    brief = f"memory: at most about {gib(worst.total)} of {gib(worst.available)} on each of {plans[0].devices}, in: {worst.name}"
    if chosen := _chosen(written, resolved):
        taken = f"chosen by the plan: {', '.join(chosen)}"
        lines.append(f"  {taken} ({planner.margin:.0%} of the memory is left free)")
        brief += f"; {taken}"
    problem = refusal(planner, stages, plans)
    if problem is not None:
        lines.append(f"  {problem}")
    checkpointing = resolved[0].config.model.checkpoints_activations
    found = substituted(config, checkpointing, _tokens(written, resolved))
    return RunPlan(found, config, tuple(lines), brief, problem)


def _undescribed(config: Config, planner: Planner, error: Exception) -> RunPlan:
    on_gpu = planner.devices.on_gpu
    taken = "true and 8192" if on_gpu else "false and null"
    line = (
        f"memory: no plan, the model cannot be described without loading it ({error}); where model.gradient_checkpointing and "
        f"optim.micro_batch_tokens are auto, {taken} are taken"
    )
    return RunPlan(substituted(config, on_gpu, UNKNOWN_TOKENS if on_gpu else None), config, (line,), line, None)


def _tokens(written: list[StagePlan], resolved: list[StagePlan]) -> int | None:
    """What was chosen for the stages that leave it open: the same for all."""
    for before, after in zip(written, resolved, strict=True):
        if before.config.optim.micro_batch_tokens == "auto":
            return after.config.optim.token_limit
    return None


def _chosen(written: list[StagePlan], resolved: list[StagePlan]) -> list[str]:
    """The settings that were left to the plan, as they would be written."""
    found = []
    if written[0].config.model.gradient_checkpointing == "auto":
        on = resolved[0].config.model.checkpoints_activations
        found.append(f"model.gradient_checkpointing={str(on).lower()}")
    if any(stage.config.optim.micro_batch_tokens == "auto" for stage in written):
        tokens = _tokens(written, resolved)
        found.append(f"optim.micro_batch_tokens={'null' if tokens is None else tokens}")
    return found
