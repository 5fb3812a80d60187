"""The memory plan of a run at its start: the values that `auto` takes, the same on every rank, and the refusal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.distributed import World
from rlvr.errors import ConfigError
from rlvr.planner.plan import Phase
from rlvr.planner.planned_devices import Devices, own_devices
from rlvr.planner.planner import UNDESCRIBED, Planner, substituted
from rlvr.planner.report import gib, plan_lines, refusal
from rlvr.planner.saved_values import automatic_keys, setting, with_saved
from rlvr.policy.loading import device_of
from rlvr.policy.microbatch import token_limit
from rlvr.rollout.automatic import with_engine

# As ENOUGH_TOKENS of the planner: enough to keep a GPU busy, the least that it would choose.
UNKNOWN_TOKENS = 8192
"""Tokens of a micro-batch on a GPU where a model cannot be described, with gradient checkpointing."""


@dataclass(frozen=True)
class RunPlan:
    """A configuration without `auto`, and the plan that chose its values."""

    config: Config
    written: Config
    """The configuration as it was, with `auto`."""
    lines: tuple[str, ...]
    """The plan in words."""
    brief: str
    """The same in a line."""
    problem: str | None
    """The reason why it cannot fit, and what would."""
    notice: str | None = None
    """The values of a checkpoint that were replaced, and the reason, in a line."""
    planner: Planner | None = None
    """Made the plan, of the devices that the run has."""


def engine_of_run(config: Config, world: World, saved: Any = None) -> tuple[Config, str | None]:
    """The configuration with the engine that `auto` takes for a run that starts here, and the reason: rank 0's, on
    every rank.

    `saved` is the engine of the checkpoint that rank 0 goes on from.
    """
    if config.rollout.engine.name != "auto":
        return config, None
    chosen = None
    if world.is_main:
        try:
            on_gpu = device_of(config.model).type == "cuda"
        except ConfigError:  # every rank is asked for its GPU later, and named (rlvr.distributed.gpu_checks)
            on_gpu = False
        chosen = with_engine(config, on_gpu, saved=saved)
    chosen = world.broadcast(chosen, "the engine")
    assert chosen is not None
    return chosen


def plan_run(config: Config, world: World, model: Any = None, eval_tasks: Any = None) -> RunPlan:
    """The plan of a run on the devices of its ranks; `model` is one that is loaded already, `eval_tasks` are tasks
    given in Python.

    ConfigError, the same on every rank, where it cannot fit and `run.check_memory` is set.
    """
    # Set by torchrun: ranks on this machine share its memory.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = own_devices(config.model, world.size, ranks_here)
    # The rank with the smallest device decides for all.
    smallest = min(world.gather(own.memory, "the memory of the devices"))
    planner = Planner(replace(own, memory=smallest), world.size, model, eval_tasks)
    plan = _decided(world, "the memory plan", lambda: _plan(config, planner))
    if plan.problem is not None and config.run.check_memory:
        raise ConfigError(f"the run {plan.problem}. Or set run.check_memory=false to get a warning instead")
    return replace(plan, planner=planner)


def plan_for(config: Config, devices: Devices, ranks: int | None = None) -> RunPlan:
    """The plan of a run on devices; without `ranks` these need not be here, and engines leave some to train on."""
    config, reason = with_engine(config, devices.on_gpu, here=ranks is not None)
    if reason is not None:
        plan = plan_for(config, devices, ranks)
        return replace(plan, lines=(reason, *plan.lines))
    return _plan(config, Planner(devices, ranks))


def plan_resumed(plan: RunPlan, world: World, saved: Mapping[str, Any]) -> RunPlan:
    """The plan of a run that goes on from a checkpoint with the configuration `saved`.

    Each `auto` keeps the value that it has there where these fit on the present devices, so that the run goes on as it
    was. Where they do not, it takes the one of `plan`, which changes results by rounding (and an adapter's dropout
    draws otherwise), and `notice` says so.
    """
    if not automatic_keys(plan.written):
        return plan
    resumed = _decided(world, "the memory plan of the checkpoint", lambda: _plan_resumed(plan, saved))
    return replace(resumed, planner=plan.planner)


def _decided(world: World, what: str, decide: Callable[[], RunPlan]) -> RunPlan:
    """Broadcast the plan that rank 0 makes. Where that fails, the waiting ranks get the error."""
    plan = None
    if world.is_main:
        try:
            plan = decide()
        # KeyboardInterrupt too: the other ranks wait in `broadcast` and would hang until their timeout.
        except BaseException as error:
            world.fail(error)
            raise
    plan = world.broadcast(plan, what)
    assert plan is not None
    return plan


def _plan_resumed(plan: RunPlan, saved: Mapping[str, Any]) -> RunPlan:
    assert plan.planner is not None
    kept = with_saved(plan.written, saved)
    keys = automatic_keys(plan.written)
    # a plan that does not fit itself is one that nobody checks
    if plan.problem is not None:
        shortage = None
    else:
        shortage = _shortage(plan.planner, kept)
    if shortage is None:
        replanned = _plan(kept, plan.planner)
        values = ", ".join(f"{key}={setting(replanned.config, key)}" for key in keys)
        return replace(replanned, written=plan.written, brief=f"{replanned.brief}; kept from the checkpoint: {values}")
    changes = ", ".join(f"{key} {setting(kept, key)} -> {setting(plan.config, key)}" for key in keys)
    dropout = plan.config.model.adapter is not None and plan.config.model.adapter.dropout > 0
    if dropout:
        differ = "rounding and by what the adapter's dropout leaves out"
    else:
        differ = "rounding alone"
    notice = (
        f"with the checkpoint's values the run would need {gib(shortage.total)} of the {gib(shortage.available)} "
        f"here, in: {shortage.name}. It goes on with those of the present plan, and results differ by {differ}: "
        f"{changes}"
    )
    return replace(plan, notice=notice, planner=None)


def _shortage(planner: Planner, config: Config) -> Phase | None:
    """The phase that lacks most memory; None where all fit, or where that is not known."""
    try:
        plans = planner.plans(planner.resolved(planner.stages(config)))
    except UNDESCRIBED:
        return None
    worst = min((plan.worst for plan in plans), key=lambda phase: phase.share_left)
    return worst if worst.left < 0 else None


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
    worst = min((plan.worst for plan in plans), key=lambda phase: phase.share_left)
    brief = (
        f"memory: at most about {gib(worst.total)} of {gib(worst.available)} on each of {plans[0].devices}, in: "
        f"{worst.name}"
    )
    if chosen := _chosen(written, resolved):
        taken = f"chosen by the plan: {', '.join(chosen)}"
        lines.append(f"  {taken} ({planner.margin:.0%} of the memory is left free)")
        brief += f"; {taken}"
    problem = refusal(planner, stages, plans)
    if problem is not None:
        lines.append(f"  {problem}")
    checkpointing = resolved[0].config.model.checkpoints_activations
    filled = substituted(config, checkpointing, _tokens(written, resolved))
    return RunPlan(filled, config, tuple(lines), brief, problem)


def _undescribed(config: Config, planner: Planner, error: Exception) -> RunPlan:
    on_gpu = planner.devices.on_gpu
    taken = f"true and {UNKNOWN_TOKENS}" if on_gpu else "false and null"
    line = (
        f"memory: no plan, the model cannot be described without loading it ({error}); where "
        f"model.gradient_checkpointing and optim.micro_batch_tokens are auto, {taken} are taken"
    )
    return RunPlan(substituted(config, on_gpu, UNKNOWN_TOKENS if on_gpu else None), config, (line,), line, None)


def _tokens(written: list[StagePlan], resolved: list[StagePlan]) -> int | None:
    """Return what was chosen for the stages that leave it open: the same for all."""
    for before, after in zip(written, resolved, strict=True):
        if before.config.optim.micro_batch_tokens == "auto":
            return token_limit(after.config.optim)
    return None


def _chosen(written: list[StagePlan], resolved: list[StagePlan]) -> list[str]:
    """The settings that were left to the plan, as they would be written."""
    settings = []
    if written[0].config.model.gradient_checkpointing == "auto":
        on = resolved[0].config.model.checkpoints_activations
        settings.append(f"model.gradient_checkpointing={str(on).lower()}")
    if any(stage.config.optim.micro_batch_tokens == "auto" for stage in written):
        tokens = _tokens(written, resolved)
        settings.append(f"optim.micro_batch_tokens={'null' if tokens is None else tokens}")
    return settings
