"""The planner: it makes the memory plans of a run's stages on given devices and chooses the values of `auto` settings.

Invariant: a choice depends on the configuration, the model, the evaluation tasks, the number of ranks and the total
memory of the devices, and never on the memory that is free at the moment. So it is the same at every start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.config import Config, ModelConfig
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.errors import RlvrError
from rlvr.planner.frozen_memory import FrozenMemory, frozen_memory
from rlvr.planner.meta_model import shape_of
from rlvr.planner.plan import Plan, plan_stage, training_ranks
from rlvr.planner.planned_devices import Devices
from rlvr.planner.shape import Shape

MARGIN = {True: 0.1, False: 0.15}
"""Share of memory that `auto` leaves free in the phases with micro-batches, on a GPU (True) and on a CPU (False). It
covers fragmentation and what the plan does not count: docs/memory.md compares plans with measurements."""
# Both token counts below are estimates, not measured on a GPU (docs/gpu.md). Lower values cost speed, higher values
# cost memory.
MOST_TOKENS = 65536
"""Upper bound of the tokens that `auto` gives a micro-batch on a GPU, unless one sequence is longer. Matrix products
saturate the device with far fewer, and the attention masks of shared prompts grow with the square of the tokens."""
ENOUGH_TOKENS = 8192
"""Tokens that keep a GPU busy. Where only smaller micro-batches fit without gradient checkpointing, `auto` turns it
on."""
# The binary search makes about seven plans: 65,536 / 512 = 128 values.
GRID = 512
"""Step size of the search for the tokens of a micro-batch."""

UNDESCRIBED = (RlvrError, OSError, ValueError, ImportError, RuntimeError, AttributeError, KeyError, TypeError)
"""Errors that mean that a model's memory cannot be planned without loading its weights. The list is wide, because the
model's own configuration code may raise any of them."""


@dataclass(eq=False)
class Planner:
    """Makes the memory plans of runs on `devices`.

    `ranks`: number of training processes, one for each device; None: all devices that the engine does not take for
    itself. `model` is given where it is loaded already, `eval_tasks` where they are given in Python.
    """

    devices: Devices
    ranks: int | None = None
    model: Any = None
    eval_tasks: Any = None
    shapes: dict[str, Shape] = field(default_factory=dict)
    """The cache of model shapes, which planners may share: computing one takes seconds."""
    frozen: dict[str, FrozenMemory] = field(default_factory=dict)
    """The cache of the memory of frozen models."""

    @property
    def margin(self) -> float:
        """Share of the memory that `auto` leaves free in the phases with micro-batches."""
        return MARGIN[self.devices.on_gpu]

    def shape(self, model: ModelConfig) -> Shape:
        """The shape of the model, cached. Raises one of `UNDESCRIBED` where it cannot be found."""
        # Only these settings change the shape; others (device, checkpointing) do not.
        names = {"path", "scratch", "revision", "dtype", "adapter", "quantization", "attention", "trust_remote_code"}
        key = model.model_dump_json(include=names)
        if key not in self.shapes:
            self.shapes[key] = shape_of(model, self.model)
        return self.shapes[key]

    def stages(self, config: Config) -> list[StagePlan]:
        """The stages of `config` as they run on these devices."""
        return self.placed(stage_plans(config))

    def placed(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """The stages with the dtype that they have on these devices, which may be those of another machine."""
        if not self.devices.on_gpu:
            return list(stages)
        dtype = stages[0].config.model.dtype
        # The plan is made on the CPU, since this machine may lack the GPUs. So "auto" becomes bfloat16, its meaning on
        # a GPU, before `device` is set to the CPU.
        overrides = {"device": "cpu", "dtype": "bfloat16" if dtype == "auto" else dtype}
        return [changed(stage, "model", **overrides) for stage in stages]

    def plans(self, stages: Sequence[StagePlan], devices: Devices | None = None) -> list[Plan]:
        """The plan of each stage. ConfigError where `ranks` is None and the engine takes every device."""
        devices = devices or self.devices
        ranks = self.ranks
        if ranks is None:
            ranks = training_ranks(stages[0].config, devices)
        shape = self.shape(stages[0].config.model)
        frozen = self._frozen(stages[0].config, devices, ranks)
        return [plan_stage(shape, stage, devices, ranks, self.eval_tasks, frozen) for stage in stages]

    def _frozen(self, config: Config, devices: Devices, ranks: int) -> FrozenMemory:
        """The memory of the frozen models, cached. Raises one of `UNDESCRIBED` where one cannot be described."""
        key = f"{config.models!r} {devices.on_gpu} {ranks}"
        if key not in self.frozen:
            self.frozen[key] = frozen_memory(config.models, devices, ranks)
        return self.frozen[key]

    def fits(self, stages: Sequence[StagePlan]) -> bool:
        """Return True if all stages fit with the margin left in the phases with micro-batches."""
        return all(plan.fits(self.margin) for plan in self.plans(stages))

    def resolved(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """The stages with a value for every `auto`: the largest micro-batches that fit, and gradient checkpointing only
        where the run does not fit without it or its micro-batches would be too small. Where nothing fits, the values
        that need the least memory."""
        model = stages[0].config.model
        if model.gradient_checkpointing != "auto":
            return self._with_tokens(stages)
        chosen: list[StagePlan] = []
        # Activation offload moves the inputs of checkpointed layers to the host, so it needs checkpointing.
        for checkpointing in [True] if model.activation_offload else [False, True]:
            tried = [changed(stage, "model", gradient_checkpointing=checkpointing) for stage in stages]
            chosen = self._with_tokens(tried)
            if self.fits(chosen) and self._keeps_busy(tried, chosen):
                break
        return chosen

    def least(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """The stages with the values that need the least memory for every `auto`. If these do not fit, none fit."""
        if stages[0].config.model.gradient_checkpointing == "auto":
            stages = [changed(stage, "model", gradient_checkpointing=True) for stage in stages]
        return _set_tokens(stages, 1)  # one sequence: a micro-batch is never smaller

    def _keeps_busy(self, before: Sequence[StagePlan], chosen: Sequence[StagePlan]) -> bool:
        """Return True if the micro-batches of `chosen` keep a GPU busy; `before` are the stages with `auto` tokens."""
        if not self.devices.on_gpu:
            return True
        # `auto` tokens are planned as no limit: the whole optimizer step of a rank in one micro-batch.
        unsplit = self.plans(before)
        return all(
            plan.tokens >= min(ENOUGH_TOKENS, most.tokens)
            for stage, plan, most in zip(before, self.plans(chosen), unsplit, strict=True)
            if stage.config.optim.micro_batch_tokens == "auto"
        )

    def _with_tokens(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """The stages with the largest `micro_batch_tokens` that fits in place of `auto`, the same for all stages."""
        if all(stage.config.optim.micro_batch_tokens != "auto" for stage in stages):
            return list(stages)
        # `auto` tokens are planned as no limit: the whole optimizer step of a rank in one micro-batch.
        plans = self.plans(stages)
        automatic = [
            plan for plan, stage in zip(plans, stages, strict=True) if stage.config.optim.micro_batch_tokens == "auto"
        ]
        most = max(plan.tokens for plan in automatic)
        # null: the whole optimizer step of a rank is one micro-batch.
        if (most <= MOST_TOKENS or not self.devices.on_gpu) and all(plan.fits(self.margin) for plan in plans):
            return _set_tokens(stages, None)
        least = max(plan.length for plan in automatic)
        # Binary search for the largest number of grid steps that fits, since memory grows with tokens. Where nothing
        # fits it ends at 0 steps: micro-batches of the longest sequence.
        low = 0
        high = max(0, (min(most, max(MOST_TOKENS, least)) - least) // GRID)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(_set_tokens(stages, least + middle * GRID)):
                low = middle
            else:
                high = middle - 1
        return _set_tokens(stages, least + low * GRID)


def changed(stage: StagePlan, section: str, **values: Any) -> StagePlan:
    """A copy of the stage with `values` in one section of its configuration."""
    config = stage.config
    updated = getattr(config, section).model_copy(update=values)
    return stage.model_copy(update={"config": config.model_copy(update={section: updated})})


def _set_tokens(stages: Sequence[StagePlan], tokens: int | None) -> list[StagePlan]:
    return [
        changed(stage, "optim", micro_batch_tokens=tokens) if stage.config.optim.micro_batch_tokens == "auto" else stage
        for stage in stages
    ]


def substituted(config: Config, checkpointing: Any, tokens: Any, of_stages: Iterable[Any] | None = None) -> Config:
    """A copy of the configuration with these values in place of `auto`. Its stages have the `tokens` too, or each its
    own of `of_stages`."""
    model = config.model
    if model.gradient_checkpointing == "auto":
        model = model.model_copy(update={"gradient_checkpointing": checkpointing})
    optim = config.optim
    if optim.micro_batch_tokens == "auto":
        optim = optim.model_copy(update={"micro_batch_tokens": tokens})
    tokens_of_stages = itertools.repeat(tokens) if of_stages is None else of_stages
    stages = [_with_tokens(stage, own) for stage, own in zip(config.stages, tokens_of_stages, strict=False)]
    return config.model_copy(update={"model": model, "optim": optim, "stages": stages})


def _with_tokens(stage: dict[str, Any], tokens: Any) -> dict[str, Any]:
    """A stage as written, with `tokens` in place of `auto`. A stage with `micro_batch_size` gets null instead, also
    where it does not set the tokens: otherwise it would inherit those of the run's section `optim`."""
    optim = stage.get("optim")
    if not isinstance(optim, dict):
        return stage
    if optim.get("micro_batch_tokens") == "auto":
        stage_tokens = tokens
        if optim.get("micro_batch_size") is not None:
            stage_tokens = None
        return {**stage, "optim": {**optim, "micro_batch_tokens": stage_tokens}}
    if optim.get("micro_batch_size") is not None and "micro_batch_tokens" not in optim:
        return {**stage, "optim": {**optim, "micro_batch_tokens": None}}
    return stage
