"""The memory plan that a run makes at its start, in numbers and in words. It chooses a value for every `auto` (the
engine too), the same on every rank, and refuses a run that does not fit into memory. A resumed run takes the values
that replaced `auto` in the configuration of its checkpoint."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.config import ComponentSpec, Config
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.core.tree import merge
from rlvr.distributed import World
from rlvr.errors import ConfigError
from rlvr.planner.fixes import fixes
from rlvr.planner.plan import Phase, Plan
from rlvr.planner.planned_devices import GIB, Devices, own_devices
from rlvr.planner.planner import UNDESCRIBED, Planner, substituted
from rlvr.policy.frozen_model import check_frozen
from rlvr.policy.loading import device_of
from rlvr.policy.microbatch import token_limit
from rlvr.rollout.vllm import installed

CHECKPOINTING = "model.gradient_checkpointing"
TOKENS = "optim.micro_batch_tokens"
# The same number as ENOUGH_TOKENS of the planner: a micro-batch of this size keeps a GPU busy.
UNKNOWN_TOKENS = 8192
"""Tokens of a micro-batch on a GPU, with gradient checkpointing, for a model whose memory cannot be planned."""


@dataclass(frozen=True)
class RunPlan:
    """The memory plan of a run, and the configuration with the values that the plan chose."""

    config: Config
    """The configuration with a value in place of each `auto` that the plan resolves."""
    written: Config
    """The configuration as the user wrote it, with `auto`."""
    lines: tuple[str, ...]
    """The plan as text, for each stage and phase."""
    brief: str
    """The plan as one line."""
    problem: str | None
    """The reason why the run does not fit, and changes that reduce its memory; None where it fits."""
    notice: str | None = None
    """One line for a resumed run that cannot keep the checkpoint's `auto` values: the new values, and the reason."""
    planner: Planner | None = None
    """The planner that made the plan. Each rank sets its own: a planner may hold the loaded model, so a plan that is
    broadcast has none."""


def engine_of_run(config: Config, world: World, saved: Any = None) -> tuple[Config, str | None]:
    """Return the configuration with an engine in place of `auto`, and the reason for the choice; None as the reason
    where the user chose the engine.

    Rank 0 chooses, and every rank gets its choice. `saved` is the engine of the checkpoint that rank 0 resumes from.
    """
    if config.rollout.engine.name != "auto":
        return config, None
    chosen = None
    if world.is_main:
        try:
            on_gpu = device_of(config.model).type == "cuda"
        # A missing GPU is reported later, with the rank that lacks it (rlvr.distributed.gpu_checks).
        except ConfigError:
            on_gpu = False
        chosen = with_engine(config, on_gpu, saved=saved)
    chosen = world.broadcast(chosen, "the engine")
    assert chosen is not None
    return chosen


def plan_run(config: Config, world: World, model: Any = None, eval_tasks: Any = None) -> RunPlan:
    """Return the plan of a run on the devices of its ranks.

    `model` is given where it is loaded already, `eval_tasks` where they are given in Python. ConfigError, the same on
    every rank, where the run does not fit and `run.check_memory` is set.
    """
    # LOCAL_WORLD_SIZE is set by torchrun. Ranks that train on the CPU share the memory of their machine.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = own_devices(config.model, world.size, ranks_here)
    # All ranks use the same values, so the plan is for the smallest device.
    smallest = min(world.gather(own.memory, "the memory of the devices"))
    planner = Planner(replace(own, memory=smallest), world.size, model, eval_tasks)
    plan = _broadcast_plan(world, "the memory plan", lambda: _checked_plan(config, planner))
    if plan.problem is not None and config.run.check_memory:
        raise ConfigError(f"the run {plan.problem}. Or set run.check_memory=false to get a warning instead")
    return replace(plan, planner=planner)


def plan_for(config: Config, devices: Devices, ranks: int | None = None) -> RunPlan:
    """Return the plan of a run on `devices`.

    `ranks` is the number of devices that are trained on. None: the devices may be those of another machine, and the run
    trains on those that the engine does not take for itself.
    """
    config, reason = with_engine(config, devices.on_gpu, here=ranks is not None)
    if reason is not None:
        plan = plan_for(config, devices, ranks)
        return replace(plan, lines=(reason, *plan.lines))
    return _plan(config, Planner(devices, ranks))


def plan_resumed(plan: RunPlan, world: World, saved: Mapping[str, Any]) -> RunPlan:
    """Return the plan of a run that resumes from a checkpoint, where `saved` is the configuration of the checkpoint.

    Each `auto` takes the value that it has in `saved` if the run then fits on the present devices: the resumed run
    computes the same numbers as before. Otherwise each takes its value of `plan`. Results then differ by rounding, and
    by other draws of an adapter's dropout, and `notice` says so.
    """
    if not automatic_keys(plan.written):
        return plan
    resumed = _broadcast_plan(world, "the memory plan of the checkpoint", lambda: _plan_resumed(plan, saved))
    return replace(resumed, planner=plan.planner)


def _broadcast_plan(world: World, what: str, decide: Callable[[], RunPlan]) -> RunPlan:
    """Make the plan on rank 0 and broadcast it. Where rank 0 fails, the waiting ranks get its error."""
    plan = None
    if world.is_main:
        try:
            plan = decide()
        # Also KeyboardInterrupt: the other ranks wait in `broadcast` and would otherwise hang until their timeout.
        except BaseException as error:
            world.fail(error)
            raise
    plan = world.broadcast(plan, what)
    assert plan is not None
    return plan


def _checked_plan(config: Config, planner: Planner) -> RunPlan:
    # On rank 0, which alone loads frozen models, and before anything large is.
    check_frozen(config.models)
    return _plan(config, planner)


def _plan_resumed(plan: RunPlan, saved: Mapping[str, Any]) -> RunPlan:
    assert plan.planner is not None
    kept = with_saved(plan.written, saved)
    keys = automatic_keys(plan.written)
    # The new plan does not fit either, and run.check_memory is off (`plan_run`): the values of the checkpoint stay.
    shortage = None
    if plan.problem is None:
        shortage = _shortage(plan.planner, kept)
    if shortage is None:
        replanned = _plan(kept, plan.planner)
        values = ", ".join(f"{key}={setting(replanned.config, key)}" for key in keys)
        return replace(replanned, written=plan.written, brief=f"{replanned.brief}; kept from the checkpoint: {values}")
    changes = ", ".join(f"{key} {setting(kept, key)} -> {setting(plan.config, key)}" for key in keys)
    dropout = plan.config.model.adapter is not None and plan.config.model.adapter.dropout > 0
    difference = "rounding alone"
    if dropout:
        difference = "rounding and other draws of the adapter's dropout"
    notice = (
        f"with the checkpoint's values the phase {shortage.name!r} would need {gib(shortage.total)}, and this machine "
        f"has {gib(shortage.available)} for it. The run takes the values of a new plan, and its results differ from "
        f"those of an uninterrupted run by {difference}: {changes}"
    )
    return replace(plan, notice=notice, planner=None)


def _shortage(planner: Planner, config: Config) -> Phase | None:
    """Return the phase that exceeds its memory by the largest share. None where every phase fits, or where the model's
    memory cannot be planned."""
    try:
        plans = planner.plans(planner.resolved(planner.stages(config)))
    except UNDESCRIBED:
        return None
    worst = min((plan.worst for plan in plans), key=lambda phase: phase.share_left)
    return worst if worst.left < 0 else None


def _plan(config: Config, planner: Planner) -> RunPlan:
    """Choose a value for each `auto` and return the plan. Without a known model, fixed values replace `auto`."""
    written = stage_plans(config)
    stages = planner.placed(written)
    try:
        resolved = planner.resolved(stages)
        plans = planner.plans(resolved)
    except UNDESCRIBED as error:
        # Without ranks (a dry run), the error of a wrong configuration or too few devices is what the user asked for.
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
        choice = f"chosen by the plan: {', '.join(chosen)}"
        lines.append(f"  {choice} ({planner.margin:.0%} of the memory is left free)")
        brief += f"; {choice}"
    problem = refusal(planner, stages, plans)
    if problem is not None:
        lines.append(f"  {problem}")
    checkpointing = resolved[0].config.model.checkpoints_activations
    filled = substituted(config, checkpointing, _tokens(written, resolved))
    return RunPlan(filled, config, tuple(lines), brief, problem)


def _undescribed(config: Config, planner: Planner, error: Exception) -> RunPlan:
    on_gpu = planner.devices.on_gpu
    fallback = f"true and {UNKNOWN_TOKENS}" if on_gpu else "false and null"
    line = (
        f"memory: no plan, the model cannot be described without loading it ({error}); where "
        f"model.gradient_checkpointing and optim.micro_batch_tokens are auto, they become {fallback}"
    )
    return RunPlan(substituted(config, on_gpu, UNKNOWN_TOKENS if on_gpu else None), config, (line,), line, None)


def _tokens(written: list[StagePlan], resolved: list[StagePlan]) -> int | None:
    """Return the tokens of a micro-batch that the plan chose: one number for all stages with `auto`."""
    for before, after in zip(written, resolved, strict=True):
        if before.config.optim.micro_batch_tokens == "auto":
            return token_limit(after.config.optim)
    return None


def _chosen(written: list[StagePlan], resolved: list[StagePlan]) -> list[str]:
    """The settings that the plan chose, as `key=value` in the spelling of a configuration."""
    settings = []
    if written[0].config.model.gradient_checkpointing == "auto":
        on = resolved[0].config.model.checkpoints_activations
        settings.append(f"model.gradient_checkpointing={str(on).lower()}")
    if any(stage.config.optim.micro_batch_tokens == "auto" for stage in written):
        tokens = _tokens(written, resolved)
        settings.append(f"optim.micro_batch_tokens={'null' if tokens is None else tokens}")
    return settings


def automatic_keys(config: Config) -> list[str]:
    """The keys of the configuration that leave their value to the memory plan."""
    keys = []
    if config.model.gradient_checkpointing == "auto":
        keys.append(CHECKPOINTING)
    if config.optim.micro_batch_tokens == "auto":
        keys.append(TOKENS)
    for number, stage in enumerate(config.stages):
        if _section(stage, "optim").get("micro_batch_tokens") == "auto":
            keys.append(f"stages.{number}.{TOKENS}")
    return keys


def with_saved(config: Config, saved: Mapping[str, Any]) -> Config:
    """`config` with what the configuration `saved` of a checkpoint has in place of each `auto`."""
    # a configuration of other stages is refused later, by the names of its keys
    before = itertools.chain(saved.get("stages", []), itertools.repeat({}))
    of_stages = (_saved_tokens(merge(saved["optim"], _section(own, "optim"))) for own in before)
    kept = saved["model"].get("gradient_checkpointing", "auto")
    return substituted(config, kept, _saved_tokens(saved["optim"]), of_stages)


def put_values(values: Config, config: Config, stages: Sequence[StagePlan]) -> None:
    """Put the values that `auto` has in `values` into the configuration of a run and of its stages, in place: parts of
    the run hold these."""
    config.model.gradient_checkpointing = values.model.gradient_checkpointing
    config.optim.micro_batch_tokens = values.optim.micro_batch_tokens
    config.stages[:] = values.stages
    for stage, other in zip(stages, stage_plans(values), strict=True):
        stage.config.model.gradient_checkpointing = other.config.model.gradient_checkpointing
        stage.config.optim.micro_batch_tokens = other.config.optim.micro_batch_tokens


def setting(config: Config, key: str) -> str:
    """The value of one of `automatic_keys` as it is written in YAML."""
    value: Any = config.dump()
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)]
        else:
            value = value[part]
    return "null" if value is None else str(value).lower()


def _section(stage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a stage as written."""
    section = stage.get(name)
    return section if isinstance(section, dict) else {}


def _saved_tokens(saved: Mapping[str, Any]) -> Any:
    """The tokens of a micro-batch in the section `optim` of a checkpoint; `auto` where it had a number of completions
    instead."""
    if saved.get("micro_batch_size") is not None:
        return "auto"
    return saved.get("micro_batch_tokens", "auto")


def gib(size: float) -> str:
    """Bytes in words."""
    # From a tenth of a GiB on, so that the plans of tiny models are not all 0.0 GiB.
    if size >= GIB / 10:
        return f"{size / GIB:.1f} GiB"
    return f"{size / (1 << 20):.1f} MiB"


def plan_lines(stages: Sequence[StagePlan], plans: Sequence[Plan]) -> list[str]:
    """For each stage the phase that takes most, the assumed lengths, and every phase part by part."""
    lines = []
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True), 1):
        worst = plan.worst
        bound = "data.max_prompt_tokens is not set"
        if stage.config.data.max_prompt_tokens:
            bound = "data.max_prompt_tokens"
        recomputed = "without"
        if stage.config.model.checkpoints_activations:
            recomputed = "with"
        trained_on = ""
        if plan.ranks < plan.devices.count:
            trained_on = f", {plan.ranks} of them trained on"
        lines += [
            f"memory of stage {number} ({stage.name}) on {plan.devices}{trained_on}: at most about {gib(worst.total)} "
            f"of {gib(worst.available)}, in: {worst.name}",
            f"  for prompts of {plan.prompt} tokens ({bound}) and {plan.length} tokens in all, micro-batches of at "
            f"most {plan.tokens} tokens, {recomputed} gradient checkpointing",
        ]
        if plan.evaluated is not None:
            lines.append(
                f"  for evaluations of {plan.evaluated.length} tokens in all, up to {plan.evaluated.responses} "
                "responses at a time"
            )
        for phase in plan.phases:
            parts = ", ".join(f"{name} {gib(size)}" for name, size in phase.parts.items())
            lines.append(f"  {phase.name}: {gib(phase.total)} ({parts})")
    return lines


def refusal(planner: Planner, stages: Sequence[StagePlan], plans: Sequence[Plan]) -> str | None:
    """The reason why a run cannot fit and what would make it fit, the smallest change first; None where it fits."""
    short = [(plan.worst.share_left, number) for number, plan in enumerate(plans) if not plan.fits()]
    if not short:
        return None
    _, number = min(short)
    worst = plans[number].worst
    largest = max(worst.parts, key=lambda name: worst.parts[name])
    return (
        f"does not fit: stage {number + 1} ({stages[number].name}) needs {gib(worst.total)} of {gib(worst.available)} "
        f"in: {worst.name}, where the largest part is {largest} with {gib(worst.parts[largest])}. "
        f"{_ways_out(planner, list(stages))}"
    )


def _ways_out(planner: Planner, stages: list[StagePlan]) -> str:
    ways = fixes(planner, stages)
    texts = []
    for number, fix in enumerate(ways, 1):
        enough = "" if fix.enough else ", not enough by itself"
        texts.append(f"({number}) {fix.text} ({gib(fix.needed)}{enough})")
    if ways and ways[0].enough:
        return f"What makes it fit, the smallest change first: {'; '.join(texts)}"
    other = ""
    if texts:
        other = f". What needs less: {'; '.join(texts)}"
    return f"Nothing that was tried makes it fit: take a smaller model{other}"


def with_engine(config: Config, on_gpu: bool, here: bool = True, saved: Any = None) -> tuple[Config, str | None]:
    """The configuration with an engine in place of `auto`, and the reason in words; the latter None where an engine was
    written.

    It is `saved`, the engine of a checkpoint, where there is one. Else `vllm` on a GPU where a vLLM for GPUs is
    installed in a version that this library takes, else `hf`. With `here` false the GPU is elsewhere, and so is what is
    installed beside it: vLLM is assumed.
    """
    if config.rollout.engine.name != "auto":
        return config, None
    # A resumed run keeps the engine of its checkpoint even where another would be chosen now: engines round
    # differently, and a change of engine in the middle of a run shows in `mismatch/*`.
    if saved is None:
        written, reason = _chosen_engine(on_gpu, here)
    else:
        written, reason = (saved, "the checkpoint was made with it")
    engine = ComponentSpec.parse(written)
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"rollout": rollout}), f"rollout.engine: auto takes {engine.name}: {reason}"


def _chosen_engine(on_gpu: bool, here: bool) -> tuple[str, str]:
    if not on_gpu:
        return "hf", "the model is computed on a CPU"
    # A dry run plans for GPUs of another machine, on one that may have no vLLM.
    if not here:
        return "vllm", "vLLM is taken to be installed beside these GPUs"
    try:
        version = installed.version()
    except ConfigError as error:
        return "hf", str(error)
    if installed.for_cpu():
        return "hf", f"vLLM {version} is built for a CPU. {installed.INSTALL}"
    return "vllm", f"the model is computed on a GPU and vLLM {version} is installed"
