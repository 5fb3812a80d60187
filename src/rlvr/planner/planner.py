"""From the stages of a run and the devices to its memory plans, with the values that `auto` leaves to them.

Invariant: what is chosen depends on the configuration, the number of ranks and the size of the devices alone, not on
what is free at the moment, so that it is the same at every start and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlvr.config import Config, ModelConfig
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.errors import RlvrError
from rlvr.planner.meta_model import shape_of
from rlvr.planner.plan import Plan, plan_stage, training_ranks
from rlvr.planner.planned_devices import Devices
from rlvr.planner.shape import Shape

MARGIN = {True: 0.1, False: 0.15}
"""Share of a GPU, and of a CPU's memory, that `auto` leaves free in the phases with micro-batches: for fragmentation
and for what the plan does not count. The plan of a micro-batch is within a tenth of what is measured, and that of a run
on a CPU within 15 % (docs/memory.md)."""
# Both numbers of tokens are judgements without a measurement on a GPU (docs/gpu.md). Lower values cost speed, higher
# ones memory that the margin may need; results differ by rounding alone.
MOST_TOKENS = 65536
"""The largest micro-batch that `auto` takes on a GPU. Matrix products fill the device long before, and the masks of
shared prompts grow with the square of it."""
ENOUGH_TOKENS = 8192
"""With fewer tokens than these a GPU is not kept busy, so `auto` takes gradient checkpointing instead."""
# A binary search over a grid: 65,536 / 512 = 128 points are seven plans.
GRID = 512
"""Tokens of a micro-batch are chosen in steps of this many."""

UNDESCRIBED = (RlvrError, OSError, ValueError, ImportError, RuntimeError, AttributeError, KeyError, TypeError)
"""Raised for a model that cannot be described without loading it: whatever its configuration's own code raises."""


class Planner:
    """Plans of runs on `devices`; `model` is one that is loaded already, `eval_tasks` are tasks given in Python.

    `ranks`: processes that train, one for each device; None: as many as engines leave of the devices.
    """

    def __init__(self, devices: Devices, ranks: int | None = None, model: Any = None, eval_tasks: Any = None) -> None:
        self.devices = devices
        self.ranks = ranks
        self.model = model
        self.eval_tasks = eval_tasks
        self._shapes: dict[str, Shape] = {}

    def share_shapes(self, shapes: dict[str, Shape]) -> None:
        """Keep the sizes of models in `shapes`, with other planners: to count them takes seconds."""
        self._shapes = shapes

    @property
    def margin(self) -> float:
        """Share of the memory that `auto` leaves free in the phases with micro-batches."""
        return MARGIN[self.devices.on_gpu]

    def shape(self, model: ModelConfig) -> Shape:
        """The sizes of the model, counted once. Raises what a model that cannot be described raises (`UNDESCRIBED`)."""
        # The settings that change the shape; others (device, checkpointing) do not.
        names = {"path", "scratch", "revision", "dtype", "adapter", "quantization", "attention", "trust_remote_code"}
        key = model.model_dump_json(include=names)
        if key not in self._shapes:
            self._shapes[key] = shape_of(model, self.model)
        return self._shapes[key]

    def stages(self, config: Config) -> list[StagePlan]:
        """The stages of `config` as they run on these devices."""
        return self.placed(stage_plans(config))

    def placed(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """The stages as they run on these devices, which need not be here."""
        if not self.devices.on_gpu:
            return list(stages)
        dtype = stages[0].config.model.dtype
        # The GPUs need not be here: the plan itself runs on fake tensors on the CPU. `auto` is bfloat16 on a GPU.
        on_gpu = {"device": "cpu", "dtype": "bfloat16" if dtype == "auto" else dtype}
        return [changed(stage, "model", **on_gpu) for stage in stages]

    def plans(self, stages: Sequence[StagePlan], devices: Devices | None = None) -> list[Plan]:
        """The plan of each stage. ConfigError where engines leave no device to train on."""
        devices = devices or self.devices
        if self.ranks is not None:
            ranks = self.ranks
        else:
            ranks = training_ranks(stages[0].config, devices)
        shape = self.shape(stages[0].config.model)
        return [plan_stage(shape, stage, devices, ranks, self.eval_tasks) for stage in stages]

    def fits(self, stages: Sequence[StagePlan], margin: float, devices: Devices | None = None) -> bool:
        """Return whether all stages fit, and leave that share of the memory in the phases with micro-batches."""
        return all(plan.fits(margin) for plan in self.plans(stages, devices))

    def resolved(self, stages: Sequence[StagePlan], devices: Devices | None = None) -> list[StagePlan]:
        """The stages with a value for every `auto`: no gradient checkpointing where the update fits without, with
        micro-batches as large as fit. Where nothing fits, the values that need least."""
        model = stages[0].config.model
        if model.gradient_checkpointing != "auto":
            return self._with_tokens(stages, devices)
        chosen: list[StagePlan] = []
        # Offloaded activations are the inputs of checkpointed layers, so they need checkpointing.
        for checkpointing in [True] if model.activation_offload else [False, True]:
            tried = [changed(stage, "model", gradient_checkpointing=checkpointing) for stage in stages]
            chosen = self._with_tokens(tried, devices)
            if self.fits(chosen, self.margin, devices) and self._keeps_busy(tried, chosen, devices):
                break
        return chosen

    def least(self, stages: Sequence[StagePlan]) -> list[StagePlan]:
        """The stages with the values for every `auto` that need least: what does not fit with these fits with none."""
        if stages[0].config.model.gradient_checkpointing == "auto":
            stages = [changed(stage, "model", gradient_checkpointing=True) for stage in stages]
        return _set_tokens(stages, 1)  # a micro-batch has at least one sequence

    def _keeps_busy(self, before: Sequence[StagePlan], chosen: Sequence[StagePlan], devices: Devices | None) -> bool:
        """Return whether the micro-batches chosen are large enough for the device."""
        if not self.devices.on_gpu:
            return True
        whole = self.plans(before, devices)
        return all(
            plan.tokens >= min(ENOUGH_TOKENS, most.tokens)
            for stage, plan, most in zip(before, self.plans(chosen, devices), whole, strict=True)
            if stage.config.optim.micro_batch_tokens == "auto"
        )

    def _with_tokens(self, stages: Sequence[StagePlan], devices: Devices | None) -> list[StagePlan]:
        """The stages with one number of tokens in place of every `auto`, the largest that fits."""
        if all(stage.config.optim.micro_batch_tokens != "auto" for stage in stages):
            return list(stages)
        plans = self.plans(stages, devices)
        automatic = [
            plan for plan, stage in zip(plans, stages, strict=True) if stage.config.optim.micro_batch_tokens == "auto"
        ]
        most = max(plan.tokens for plan in automatic)
        # The whole optimizer step in one micro-batch is written as null.
        if (most <= MOST_TOKENS or not self.devices.on_gpu) and all(plan.fits(self.margin) for plan in plans):
            return _set_tokens(stages, None)
        least = max(plan.length for plan in automatic)
        # Binary search for the largest number of grid steps that fits; memory grows with tokens. 0, one sequence, is
        # taken where none fits.
        low = 0
        high = max(0, (min(most, max(MOST_TOKENS, least)) - least) // GRID)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(_set_tokens(stages, least + middle * GRID), self.margin, devices):
                low = middle
            else:
                high = middle - 1
        return _set_tokens(stages, least + low * GRID)


def changed(stage: StagePlan, section: str, **values: Any) -> StagePlan:
    """The stage with other values in a section of its configuration."""
    config = stage.config
    own = getattr(config, section).model_copy(update=values)
    return stage.model_copy(update={"config": config.model_copy(update={section: own})})


def _set_tokens(stages: Sequence[StagePlan], tokens: int | None) -> list[StagePlan]:
    return [
        changed(stage, "optim", micro_batch_tokens=tokens) if stage.config.optim.micro_batch_tokens == "auto" else stage
        for stage in stages
    ]


def substituted(config: Config, checkpointing: bool, tokens: int | None) -> Config:
    """The configuration with these values in place of each `auto`."""
    model = config.model
    if model.gradient_checkpointing == "auto":
        model = model.model_copy(update={"gradient_checkpointing": checkpointing})
    optim = config.optim
    if optim.micro_batch_tokens == "auto":
        optim = optim.model_copy(update={"micro_batch_tokens": tokens})
    stages = [with_tokens(stage, tokens) for stage in config.stages]
    return config.model_copy(update={"model": model, "optim": optim, "stages": stages})


def with_tokens(stage: dict[str, Any], tokens: Any) -> dict[str, Any]:
    """A stage as written, with `tokens` for `auto`. One with a number of completions says that it has none of
    tokens."""
    optim = stage.get("optim")
    if not isinstance(optim, dict):
        return stage
    if optim.get("micro_batch_tokens") == "auto":
        if optim.get("micro_batch_size") is not None:
            own = None
        else:
            own = tokens
        return {**stage, "optim": {**optim, "micro_batch_tokens": own}}
    if optim.get("micro_batch_size") is not None and "micro_batch_tokens" not in optim:
        return {**stage, "optim": {**optim, "micro_batch_tokens": None}}
    return stage
