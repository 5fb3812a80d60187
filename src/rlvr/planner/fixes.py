"""Changes that make a run fit: tried in the planner, the smallest first."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlvr import registry
from rlvr.config import ComponentSpec, Config, LoraConfig
from rlvr.config.stage_plan import StagePlan
from rlvr.planner.engine_memory import utilization
from rlvr.planner.plan import Plan
from rlvr.planner.planned_devices import UNITS, Devices
from rlvr.planner.planner import UNDESCRIBED, Planner, changed
from rlvr.policy.loading import dtype_of
from rlvr.rollout.hf import HFEngineOptions
from rlvr.rollout.vllm.options import VLLMOptions
from rlvr.rollout.vllm.settings import CommonSettings

# With ten changes 10 + 45 + 120 + 210 sets; five together would be longer than anybody reads.
TOGETHER = 4
"""Changes that are tried at once at most."""
# A plan takes milliseconds once the model is measured; a refusal should not take longer than a start.
TRIES = 500
"""Sets of changes that are tried at most: a few seconds."""
FIXES = 3
"""Fixes that are named."""
# NVIDIA datasheets: T4 and V100 16, L4 and RTX 3090/4090 24, V100 32, A100 40 and 80, L40S 48, H100 80, RTX PRO 6000
# 96, H200 141, B200 180 to 192, B300 288.
SIZES = (16, 24, 32, 40, 48, 80, 96, 141, 180, 192, 288)
"""Memory of GPUs that are sold, in GB."""
# Beyond this the answer is another setting, not more devices; the loop doubles, so it ends after ten rounds.
MOST_DEVICES = 1024

Stages = list[StagePlan]


@dataclass(frozen=True)
class Change:
    """A setting that needs less memory, as it is written in a configuration, with values from mild to strong."""

    values: tuple[Any, ...]
    text: Callable[[Any], str]
    """As overrides of the command; empty where only the number of devices changes."""
    make: Callable[[Stages, Any], Stages]
    devices: Callable[[Devices, Any], Devices] = lambda devices, value: devices

    @property
    def settings(self) -> frozenset[str]:
        """The settings that it changes, by their names."""
        names = frozenset(re.findall(r"([\w.]+)=", self.text(self.values[-1])))
        one = Devices(1, 1.0)
        if self.devices(one, self.values[-1]) == one:
            return names
        return names | {"devices"}


@dataclass(frozen=True)
class Fix:
    """Changes that together make a run fit."""

    text: str
    needed: float
    """Bytes, with the smallest micro-batches: of the phase which does not fit, or, where it is `enough`, of the largest
    phase."""
    enough: bool = True
    """True if the run fits with the changes."""


def fixes(planner: Planner, stages: Stages) -> list[Fix]:
    """At most three ways to make the stages fit, those with the fewest and smallest changes first, and last devices of
    the smallest memory and number on which they fit unchanged; in their place, where there are fewer, single changes by
    which the phase that does not fit needs less, those that save most first."""
    changes = list(_changes(planner, stages))
    larger = _larger_devices(planner, stages)
    on_larger = [] if larger is None else [larger]
    enough: list[Fix] = []
    used: list[frozenset[str]] = []
    for picked in itertools.islice(_together(changes), TRIES):
        # Sets of three and four are looked at only where no one or two changes are enough.
        if len(picked) > 2 and enough:
            break
        settings = frozenset[str]().union(*(change.settings for change in picked))
        # A proper subset of these settings is already a fix.
        if any(before < settings for before in used):
            continue
        fix = _tried(planner, stages, picked)
        if fix is not None:
            enough.append(fix)
            used.append(settings)
        if len(enough) + len(on_larger) == FIXES:
            break
    helping: list[Fix] = []
    if len(enough) + len(on_larger) < FIXES:
        helpful = [change for change in changes if not any(before <= change.settings for before in used)]
        helping = _helping(planner, stages, helpful)[: FIXES - len(enough) - len(on_larger)]
    return sorted([*enough, *helping, *on_larger], key=lambda fix: not fix.enough)


def _together(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """The changes alone, in twos, and so on, of each number the smallest changes first, as they are in the list."""
    for together in range(1, TOGETHER + 1):
        # The list is ordered from mild to strong, so the sum of places orders sets of one size by how much they change.
        for chosen in sorted(itertools.combinations(range(len(changes)), together), key=sum):
            picked = [changes[number] for number in chosen]
            if not _exclude_each_other(picked):
                yield picked


def _exclude_each_other(changes: Sequence[Change]) -> bool:
    """Return True if two of the changes set the same setting, or an option of an engine that another one replaces."""
    for one, other in itertools.permutations(changes, 2):
        if one.settings & other.settings:
            return True
        if "rollout.engine" in one.settings and any(name.startswith("rollout.engine.") for name in other.settings):
            return True
    return False


def _larger_devices(planner: Planner, stages: Stages) -> Fix | None:
    """Devices of the smallest memory, and of those as few, on which the stages fit unchanged."""
    devices = planner.devices
    if not devices.on_gpu:
        return None
    count = devices.count
    while count <= MOST_DEVICES:
        for size in SIZES:
            tried = Devices(count, size * UNITS["GB"])
            if tried.memory < devices.memory or tried == devices:
                continue
            plans = _plans(planner, planner.least(stages), tried)
            if plans is not None and all(plan.fits(planner.margin) for plan in plans):
                return Fix(f"{count} device{'s' if count > 1 else ''} of {size} GB", max(plan.needed for plan in plans))
        count *= 2
    return None


def _helping(planner: Planner, stages: Stages, changes: Sequence[Change]) -> list[Fix]:
    """The changes by which alone, with their strongest values, the phase that does not fit needs less; those that save
    most first."""
    plans = planner.plans(planner.least(stages))
    number = min(range(len(plans)), key=lambda number: plans[number].worst.share_left)
    worst = plans[number].worst
    less: list[tuple[float, Fix]] = []
    for change in changes:
        after = _changed_plans(planner, stages, [change], [change.values[-1]])
        if after is None:
            continue
        phase = next((phase for phase in after[number].phases if phase.name == worst.name), None)
        if phase is not None and phase.left > worst.left:
            # Reported as not enough where the phase still lacks memory.
            enough = all(plan.fits() for plan in after)  # without the margin that is left free
            less.append((phase.left, Fix(_text(planner, [change], [change.values[-1]]), phase.total, enough)))
    return [fix for _, fix in sorted(less, key=lambda one: -one[0])]


def _tried(planner: Planner, stages: Stages, changes: Sequence[Change]) -> Fix | None:
    """The changes with the mildest values that fit; None where the strongest do not."""
    # If the strongest values are not enough, no milder ones are: needs fall along `values`.
    values = [change.values[-1] for change in changes]
    if _made(planner, stages, changes, values) is None:
        return None
    for place, change in enumerate(changes):
        for milder in change.values[:-1]:
            tried = [*values[:place], milder, *values[place + 1 :]]
            if _made(planner, stages, changes, tried) is not None:
                values = tried
                break
    needed = _made(planner, stages, changes, values)
    assert needed is not None
    return Fix(_text(planner, changes, values), needed)


def _text(planner: Planner, changes: Sequence[Change], values: Sequence[Any]) -> str:
    """The changes as overrides, and behind them the number of devices where that is another."""
    devices = planner.devices
    overrides = []
    for change, value in zip(changes, values, strict=True):
        devices = change.devices(devices, value)
        overrides.append(change.text(value))
    text = " ".join(filter(None, overrides))
    if devices == planner.devices:
        return text
    if text:
        return f"{text}, on {devices.count} devices"
    return f"{devices.count} devices"


def _made(planner: Planner, stages: Stages, changes: Sequence[Change], values: Sequence[Any]) -> float | None:
    """Bytes that a device needs at least after the changes; None where they do not fit."""
    plans = _changed_plans(planner, stages, changes, values)
    if plans is None or not all(plan.fits(planner.margin) for plan in plans):
        return None
    return max(plan.needed for plan in plans)


def _changed_plans(
    planner: Planner, stages: Stages, changes: Sequence[Change], values: Sequence[Any]
) -> list[Plan] | None:
    """The plans after the changes; None where these exclude each other."""
    devices = planner.devices
    for change, value in zip(changes, values, strict=True):
        stages = change.make(stages, value)
        devices = change.devices(devices, value)
    if not _allowed(stages[0].config):
        return None
    return _plans(planner, planner.least(stages), devices)


def _plans(planner: Planner, stages: Stages, devices: Devices) -> list[Plan] | None:
    try:
        return planner.plans(stages, devices)
    except UNDESCRIBED:  # engines leave no device to train on
        return None


def _allowed(config: Config) -> bool:
    """Return True if the backend takes these settings together (rlvr.config.updating, rlvr.distributed.deepspeed,
    rlvr.policy.loading)."""
    distributed = config.distributed
    backend = distributed.backend_spec
    offloads = backend.options.get("offload", distributed.offload) != "none"
    if offloads and distributed.offloads_during_rollout:
        return False
    if backend.name != "deepspeed":
        return not offloads
    # adamw_8bit is refused under DeepSpeed; 4-bit weights and sampling with the trainer's own weights need them whole,
    # which ZeRO 3 does not have.
    whole = backend.options["zero_stage"] < 3
    samples_here = config.rollout.engine.name in ("hf", "recorded")
    eight_bits = config.optim.optimizer.name == "adamw_8bit"
    return not eight_bits and (whole or (config.model.quantization is None and not samples_here))


def _each(section: str, **values: Any) -> Callable[[Stages, Any], Stages]:
    """Set these values of a section in all stages."""
    return lambda stages, _: [changed(stage, section, **values) for stage in stages]


def _setting(text: str, section: str, **values: Any) -> Change:
    return Change((None,), lambda _: text, _each(section, **values))


def _changes(planner: Planner, stages: Stages) -> Iterator[Change]:
    """The changes that this run has not made yet, from the smallest to the largest."""
    config = stages[0].config
    on_gpu = planner.devices.on_gpu
    backend = config.distributed.backend.name
    backend_options = config.distributed.backend_spec.options
    ranks = planner.plans(stages)[0].ranks
    optims = [stage.config.optim for stage in stages]
    if any(optim.micro_batch_tokens != "auto" for optim in optims):
        automatic = {"micro_batch_tokens": "auto", "micro_batch_size": None}
        sized = ""
        if any(optim.micro_batch_size is not None for optim in optims):
            sized = " optim.micro_batch_size=null"
        yield _setting(f"optim.micro_batch_tokens=auto{sized}", "optim", **automatic)
    if config.model.gradient_checkpointing is False:
        yield _setting("model.gradient_checkpointing=true", "model", gradient_checkpointing=True)
    yield from _engine_changes(planner, stages)
    moves = config.distributed.offloads_during_rollout or backend_options.get("offload", "none") != "none"
    if on_gpu and backend in ("plain", "deepspeed") and not moves:
        yield _setting("distributed.offload_during_rollout=true", "distributed", offload_during_rollout=True)
    if on_gpu and not config.model.activation_offload:
        offloaded = {"activation_offload": True, "gradient_checkpointing": True}
        yield _setting("model.activation_offload=true model.gradient_checkpointing=true", "model", **offloaded)
    if backend == "plain" and config.optim.optimizer.name == "adamw":
        yield _setting("optim.optimizer=adamw_8bit", "optim", optimizer=ComponentSpec("adamw_8bit"))
    stage = 0
    if backend == "deepspeed":
        stage = backend_options.get("zero_stage", 0)
    if backend in ("plain", "deepspeed") and ranks > 1 and stage < 3:
        yield _sharded(range(max(2, stage + 1), 4))
    if on_gpu and backend in ("plain", "deepspeed") and not moves:
        yield _setting("distributed.offload=optimizer", "distributed", offload="optimizer")
    if config.rollout.staleness:
        yield _setting("rollout.staleness=0", "rollout", staleness=0)
    longest = max(one.config.rollout.max_new_tokens for one in stages)
    # Shorter responses change the experiment: offered only where they are long, and never below 256 tokens.
    if longest >= 1024:
        # A half, a quarter, an eighth.
        halves = tuple(longest >> power for power in (1, 2, 3) if longest >> power >= 256)
        yield Change(halves, lambda new: f"rollout.max_new_tokens={new}", _set_longest)
    if config.model.adapter is None:
        yield _setting("model.adapter='{r: 16}'", "model", adapter=LoraConfig())
        if config.model.path is not None:
            quantized = {"adapter": LoraConfig(), "quantization": "nf4"}
            yield _setting("model.adapter='{r: 16}' model.quantization=nf4", "model", **quantized)
    elif config.model.quantization is None and config.model.path is not None:
        yield _setting("model.quantization=nf4", "model", quantization="nf4")
    if on_gpu:
        # 2 to 256 times as many devices.
        factors = tuple(2**power for power in range(1, 9))
        yield Change(
            factors,
            lambda factor: "",
            lambda stages, _: stages,
            lambda devices, factor: replace(devices, count=devices.count * factor),
        )


def _sharded(zero_stages: range) -> Change:
    def make(stages: Stages, number: int) -> Stages:
        return _each("distributed", backend=ComponentSpec("deepspeed"), zero_stage=number)(stages, None)

    return Change(tuple(zero_stages), lambda n: f"distributed.backend=deepspeed distributed.zero_stage={n}", make)


def _set_longest(stages: Stages, new: int) -> Stages:
    return [changed(stage, "rollout", max_new_tokens=min(new, stage.config.rollout.max_new_tokens)) for stage in stages]


def _with_engine(stages: Stages, options: dict[str, Any]) -> Stages:
    return _each("rollout", engine=stages[0].config.rollout.engine.with_options(**options))(stages, None)


def _with_server(stages: Stages, split: int) -> Stages:
    return _each("rollout", engine=ComponentSpec("vllm-server", {"tensor_parallel_size": split}))(stages, None)


def _engine_changes(planner: Planner, stages: Stages) -> Iterator[Change]:
    options = registry.build("engine", stages[0].config.rollout.engine)
    if isinstance(options, HFEngineOptions):
        rollout = stages[0].config.rollout
        evaluated = [plan.evaluated.responses for plan in planner.plans(stages) if plan.evaluated is not None]
        rows = min(options.max_rows, max(rollout.prompts_per_step * rollout.group_size, *evaluated, 0))
        if fewer := tuple(rows >> power for power in range(1, 8) if rows >> power >= 8):
            yield Change(
                fewer,
                lambda most: f"rollout.engine.max_rows={most}",
                lambda stages, most: _with_engine(stages, {"max_rows": most}),
            )
    if not isinstance(options, CommonSettings) or not planner.devices.on_gpu:
        return
    # gpu_memory_utilization in twentieths.
    if shares := tuple(_shares(planner, stages, options)):
        yield Change(
            shares,
            lambda share: f"rollout.engine.gpu_memory_utilization={share}",
            lambda stages, share: _with_engine(stages, {"gpu_memory_utilization": share}),
        )
    yield from _in_fp8(planner, stages, options)
    if isinstance(options, VLLMOptions):
        count = planner.devices.count
        here = tuple(split for split in (1, 2, 4, 8) if split < count)
        if here and planner.ranks is None:  # ranks that are started already leave none of theirs to a server
            yield Change(here, _server, _with_server)
        yield Change(
            (1, 2, 4, 8), _server, _with_server, lambda devices, split: replace(devices, count=devices.count + split)
        )
    yield Change(
        (64, 32, 16, 8),
        lambda rows: f"rollout.engine='{{name: hf, max_rows: {rows}}}'",
        lambda stages, rows: _each("rollout", engine=ComponentSpec("hf", {"max_rows": rows}))(stages, None),
    )
    if isinstance(options, VLLMOptions) and not options.sleep:
        yield Change(
            (None,), lambda _: "rollout.engine.sleep=true", lambda stages, _: _with_engine(stages, {"sleep": True})
        )


def _server(split: int) -> str:
    return f"rollout.engine='{{name: vllm-server, tensor_parallel_size: {split}}}'"


def _in_fp8(planner: Planner, stages: Stages, options: CommonSettings) -> Iterator[Change]:
    """Weights of linear layers in fp8, with the present share of the GPU and with others that hold them."""
    if options.quantization is not None or dtype_of(stages[0].config.model) not in (torch.bfloat16, torch.float16):
        return
    quantized = _with_engine(stages, {"quantization": "fp8"})
    shares = (utilization(options), *_shares(planner, quantized, options))
    yield Change(
        shares,
        lambda share: f"rollout.engine.quantization=fp8 rollout.engine.gpu_memory_utilization={share}",
        lambda stages, share: _with_engine(stages, {"quantization": "fp8", "gpu_memory_utilization": share}),
    )


def _shares(planner: Planner, stages: Stages, options: CommonSettings) -> Iterator[float]:
    """Shares of a GPU that hold vLLM's weights and its work, from large to small; larger ones where the present is too
    small."""
    phases = [phase for plan in planner.plans(stages) for phase in plan.phases]
    inside = max((phase.total for phase in phases if phase.available < planner.devices.memory), default=0.0)
    # Twentieths: the smallest share that holds what vLLM needs and the margin.
    least = math.ceil(20 * inside / (1 - planner.margin) / planner.devices.memory)
    now = utilization(options)
    # 19 of 20: vLLM takes no whole GPU.
    most = 19 if least > 20 * now else math.ceil(20 * now) - 1
    for twentieth in range(most, least - 1, -1):
        yield twentieth / 20
