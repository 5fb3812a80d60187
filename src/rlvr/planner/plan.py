"""The memory plan of a stage: what each phase of a step takes of one device, part by part, before any weight is loaded.

Every completion is taken to be as long as it may be, so the plan is of the worst step. Not counted: fragmentation, the
passes of scorers in an evaluation or a reward, keys and values of a judge that is a frozen model, and what verifiers
take in processes of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rlvr import registry
from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan
from rlvr.errors import ConfigError
from rlvr.losses.reference_test import compares_with_reference, reads_reference
from rlvr.planner.engine_memory import ENGINE, PROGRAM, EngineMemory, engine_memory, shares_weights
from rlvr.planner.frozen_memory import FrozenMemory
from rlvr.planner.micro_batch import micro_batch_bytes, scoring_bytes
from rlvr.planner.planned_devices import GIB, Devices
from rlvr.planner.sampled import Sampled, in_evaluation, lengths
from rlvr.planner.shape import MemoryParts, Shape
from rlvr.planner.trainer_memory import (
    EVALUATION,
    PHASES,
    PUBLISH,
    SAMPLING,
    SCORING,
    START,
    STEP,
    UPDATE,
    TrainerMemory,
    trainer_memory,
)
from rlvr.policy.loading import dtype_of
from rlvr.policy.microbatch import token_limit
from rlvr.rewards import build_terms, walk
from rlvr.rollout.vllm.options import VLLMOptions, VLLMServerOptions

# An estimate that no GPU has confirmed yet (docs/gpu.md).
CONTEXT = GIB
"""A GPU context of the trainer with NCCL's buffers and loaded kernels."""
PASSES = (UPDATE, SCORING)
"""Phases whose memory depends on the size of the micro-batches. Smaller ones free nothing in the others."""


@dataclass(frozen=True)
class Phase:
    """Memory of a phase on one device."""

    name: str
    parts: MemoryParts
    available: float
    """Bytes that there are for it: the device, or vLLM's share of it."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def left(self) -> float:
        """Bytes that are not taken; negative where it does not fit."""
        return self.available - self.total

    @property
    def share_left(self) -> float:
        """Memory left as a share of what there is; negative where the phase does not fit."""
        return self.left / self.available


@dataclass(frozen=True)
class Plan:
    """Memory of a stage on each device that it trains on."""

    devices: Devices
    ranks: int
    """Devices that are trained on; the others are an engine's."""
    phases: tuple[Phase, ...]
    prompt: int
    length: int
    """Tokens of the longest prompt and of the longest sequence, as far as the settings bound them."""
    tokens: int
    """Tokens of the largest micro-batch."""
    evaluated: Sampled | None = None
    """The responses that an evaluation samples at once."""

    @property
    def worst(self) -> Phase:
        """The phase with the smallest share of its memory left."""
        return min(self.phases, key=lambda phase: phase.share_left)

    @property
    def needed(self) -> float:
        """Bytes that a device that is trained on needs at most."""
        return max(phase.total for phase in self.phases if phase.name != ENGINE)

    def fits(self, margin: float = 0.0) -> bool:
        """Return True if every phase fits, and those that micro-batches decide leave that share of the memory."""
        # The margin is for what a smaller micro-batch can give: other phases need what they need, and a margin on them
        # would refuse runs that fit.
        return all(phase.left >= (margin if phase.name in PASSES else 0.0) * phase.available for phase in self.phases)


def training_ranks(config: Config, devices: Devices) -> int:
    """The devices that are trained on, where `devices` are all there are. ConfigError where engines leave none."""
    options = registry.build("engine", config.rollout.engine)
    taken = 0
    if isinstance(options, VLLMServerOptions) and not options.urls:
        taken = options.servers * options.tensor_parallel_size * options.data_parallel_size
    elif isinstance(options, VLLMOptions):
        # The embedded engine shares the trainer's GPU; its further ranks take GPUs of their own.
        taken = options.tensor_parallel_size - 1
    if devices.on_gpu and taken >= devices.count:
        raise ConfigError(
            f"rollout.engine takes {taken} GPUs that no rank trains on, and there are {devices.count}: give more "
            "devices, start fewer servers, or use the engine `vllm` with tensor_parallel_size 1, which shares the "
            "trainer's GPU"
        )
    if devices.on_gpu:
        return devices.count - taken
    return devices.count


def step_rows(config: Config, ranks: int, sampled: bool) -> int:
    """Completions of one optimizer step that a rank computes at most."""
    # Prompts of one optimizer step: a batch is cut into updates_per_batch parts by whole groups.
    prompts = math.ceil(
        config.rollout.prompts_per_step / min(config.optim.updates_per_batch, config.rollout.prompts_per_step)
    )
    group = config.rollout.group_size if sampled else 1
    if prompts >= 2 * ranks:  # ranks get whole groups (rlvr.learner)
        return math.ceil(prompts / ranks) * group
    return math.ceil(prompts * group / ranks)


def micro_batch_tokens(shape: Shape, config: Config, ranks: int, sampled: bool) -> int:
    """Tokens of the largest micro-batch of a rank."""
    _, length = lengths(shape, config)
    rows = step_rows(config, ranks, sampled)
    optim = config.optim
    # A micro-batch holds at least one sequence, however low the limit is.
    if (limit := token_limit(optim)) is not None:
        return min(rows * length, max(length, limit))
    return min(rows, optim.micro_batch_size or rows) * length


def keeps_reference(stage: StagePlan) -> bool:
    """Return True if the stage keeps a copy of the weights to compare with."""
    if stage.kind != "sft":
        terms = walk(build_terms(stage.config.rewards))
        return compares_with_reference(stage.config.algorithm) or any(t.function.needs_reference for t in terms)
    loss = stage.options.get("loss", "likelihood")
    return loss != "likelihood" and reads_reference("auxiliary", loss)


def plan_stage(
    shape: Shape,
    stage: StagePlan,
    devices: Devices,
    ranks: int,
    eval_tasks: Any = None,
    frozen: FrozenMemory | None = None,
) -> Plan:
    """The plan of a stage that trains on `ranks` of the devices, beside `frozen` models; `eval_tasks` are given in
    Python, in the place of `data.eval`."""
    config = stage.config
    sampled = stage.kind != "sft"
    options = registry.build("engine", config.rollout.engine)
    bfloat16 = dtype_of(config.model) == torch.bfloat16
    trainer = trainer_memory(
        shape,
        config,
        ranks,
        devices.on_gpu,
        bfloat16,
        keeps_reference(stage),
        frees_gradients=not shares_weights(options, config),
    )
    work = Passes(shape, config, devices, ranks, sampled, trainer)
    evaluated = in_evaluation(shape, config, eval_tasks)
    engine = engine_memory(options, shape, config, devices, ranks, sampled, evaluated)
    return Plan(
        devices,
        ranks,
        tuple(phase for phase in _phases(work, engine, frozen or FrozenMemory()) if phase.parts),
        *lengths(shape, config),
        tokens=micro_batch_tokens(shape, config, ranks, sampled),
        evaluated=evaluated,
    )


def _phases(work: Passes, engine: EngineMemory, frozen: FrozenMemory) -> list[Phase]:
    """All phases, with the parts of the trainer, of the engine and of frozen models in each."""
    trainer = work.trainer
    program = {"programs": (CONTEXT if work.devices.on_gpu else PROGRAM) + engine.program} | frozen.weights
    if engine.sleeps:
        beside = engine.always
    else:
        beside = engine.awake | engine.always
    # With staleness the engine samples while the trainer updates and scores.
    overlapping = {}
    if work.config.rollout.staleness:
        overlapping = engine.sampling | frozen.scoring
    by_phase: dict[str, MemoryParts] = {
        START: program | trainer.at(START) | engine.demanded,
        UPDATE: program | trainer.at(UPDATE) | beside | _added(work.update(), overlapping),
        STEP: program | trainer.at(STEP) | beside | overlapping,
    }
    if work.sampled:
        # The bucket of the publish and the weights of the check's own pass are not there at the same time.
        sent = max(trainer.published(), trainer.pass_weights(PUBLISH), key=lambda parts: sum(parts.values()))
        if engine.has_weights:
            by_phase[PUBLISH] = program | trainer.at(PUBLISH) | engine.awake | engine.always | sent
        by_phase[SAMPLING] = (
            program | trainer.at(SAMPLING) | engine.awake | engine.always | engine.sampling | frozen.scoring
        )
    if engine.evaluating:
        evaluating = engine.evaluating | frozen.scoring
        by_phase[EVALUATION] = program | trainer.at(EVALUATION) | engine.awake | engine.always | evaluating
    if trainer.reference:
        by_phase[SCORING] = program | trainer.at(SCORING) | beside | _added(work.scoring(), overlapping)
    phases = [
        Phase(name, {key: size for key, size in parts.items() if size}, work.devices.memory)
        for name, parts in sorted(by_phase.items(), key=lambda one: PHASES.index(one[0]))
    ]
    if engine.inside:
        phases.append(Phase(ENGINE, engine.inside, engine.share))
    return phases


def _added(one: MemoryParts, other: MemoryParts) -> MemoryParts:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in dict.fromkeys([*one, *other])}


@dataclass(frozen=True)
class Passes:
    """The passes of a stage."""

    shape: Shape
    config: Config
    devices: Devices
    ranks: int
    sampled: bool
    trainer: TrainerMemory

    def update(self) -> MemoryParts:
        """Of one micro-batch with gradients, laid out as takes most of what `optim.packing` and `optim.share_prefix`
        leave open."""
        optim = self.config.optim
        padded = optim.packing is False or (optim.packing == "auto" and not self.packs())
        # `share_prefix: true` leaves one layout. With `auto` any may be taken, and the larger one counts. Layers with a
        # window have as many keys in a shared row as in rows apart, at most (`cut_shared`).
        only_shared = optim.share_prefix is True and not self.shape.windowed
        layouts = [] if only_shared else [(*self.apart(), padded, 0)]
        if self.sampled and self.config.rollout.group_size > 1 and False not in (optim.packing, optim.share_prefix):
            prompt, _ = lengths(self.shape, self.config)
            layouts.append((*self.shared(), False, prompt))
        tried = (self._micro_batch(*layout) for layout in layouts or [(*self.apart(), padded, 0)])
        parts = max(tried, key=lambda parts: sum(parts.values()))
        if self.trainer.casts:
            return parts
        return parts | self.trainer.pass_weights(UPDATE)

    def packs(self) -> bool:
        """True where `optim.packing: auto` takes packed rows for rollouts of the largest length without padding."""
        _, length = lengths(self.shape, self.config)
        if not self.shape.packs or length > self.shape.one_rope_up_to:
            return False
        # A GPU packs rows where there is no padding to save too; a CPU pads them then (GAIN in rlvr.policy.microbatch),
        # unless padded rows would have masks.
        return self.devices.on_gpu or length > self.shape.masked_beyond

    @property
    def _gpu_memory(self) -> float | None:
        return self.devices.memory if self.devices.on_gpu else None

    def _micro_batch(self, tokens: float, trained: float, padded: bool, prefix: int = 0) -> MemoryParts:
        _, length = lengths(self.shape, self.config)
        return micro_batch_bytes(
            self.shape,
            self.config.model,
            tokens,
            trained,
            length,
            padded=padded,
            deepspeed=self.trainer.stage > 0,
            gpu_memory=self._gpu_memory,
            prefix=prefix,
        )

    def apart(self) -> tuple[float, float]:
        """Tokens of the largest micro-batch of whole rollouts, and those of them that are trained."""
        prompt, length = lengths(self.shape, self.config)
        tokens = micro_batch_tokens(self.shape, self.config, self.ranks, self.sampled)
        return tokens, tokens * (length - prompt) / length

    def shared(self) -> tuple[float, float]:
        """Tokens of the largest micro-batch where each prompt is computed once for its group, and those of them that
        are trained (a larger share than in `apart`)."""
        prompt, length = lengths(self.shape, self.config)
        optim = self.config.optim
        group = self.config.rollout.group_size
        own = length - prompt
        rows = step_rows(self.config, self.ranks, self.sampled)
        if (limit := token_limit(optim)) is None:
            rows = min(rows, optim.micro_batch_size or rows)
        else:
            # Whole groups of one prompt and `group` responses fit into the limit, then one more prompt with as many
            # responses as the rest holds.
            whole, left = divmod(limit, prompt + group * own)
            rows = min(rows, max(1, whole * group + max(0, left - prompt) // own))
        return math.ceil(rows / group) * prompt + rows * own, rows * own

    def scoring(self) -> MemoryParts:
        """Bytes of one micro-batch without gradients, by part."""
        tokens = micro_batch_tokens(self.shape, self.config, self.ranks, self.sampled)
        _, length = lengths(self.shape, self.config)
        activations = scoring_bytes(self.shape, self.config.model, tokens, length, self._gpu_memory)
        return {"activations": activations} | self.trainer.pass_weights(SCORING)
