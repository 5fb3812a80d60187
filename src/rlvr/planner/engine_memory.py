"""What the engine that samples takes of a device that is trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from rlvr.config import Config
from rlvr.planner.devices import Devices
from rlvr.planner.micro_batch import LOGITS_COPIES, layer_bytes
from rlvr.planner.shape import Shape
from rlvr.planner.trainer_memory import Parts
from rlvr.policy.loading import dtype_of
from rlvr.rollout.hf import HFEngineOptions
from rlvr.rollout.recorded import RecordedOptions
from rlvr.rollout.vllm.options import Common, VLLMOptions, VLLMServerOptions

GIB = 1 << 30
PROGRAM = 550 << 20
"""Python, torch and transformers themselves, as measured on a CPU."""
CONTEXT = 2 * GIB
"""vLLM's GPU context and CUDA graphs, which stay while it sleeps."""
WORK = 2 * GIB
"""What vLLM takes of its share beside weights, keys and values: the activations of a batch of prompts, by its own profile run."""
CPU_CACHE = 1.0
"""GiB of keys and values that vLLM takes on a CPU where nothing else is set."""
PROMPT = 512
"""Tokens that a prompt is taken to have where no setting bounds it."""
ENGINE = "vLLM's share"


@dataclass(frozen=True)
class EngineMemory:
    """Bytes by part on a device that is trained on."""

    program: float = 0.0
    """Of its process, all the time."""
    has_weights: bool = False
    """Whether weights are sent to it."""
    sleeps: bool = False
    """Whether it gives `awake` back outside of publish and sampling."""
    awake: Parts = field(default_factory=dict)
    always: Parts = field(default_factory=dict)
    demanded: Parts = field(default_factory=dict)
    """At its start, when the trainer's weights are loaded."""
    sampling: Parts = field(default_factory=dict)
    inside: Parts = field(default_factory=dict)
    """What has to fit into vLLM's `share` of a GPU."""
    share: float = 0.0


def lengths(shape: Shape, config: Config) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest sequence, as far as the settings bound them."""
    new = min(config.rollout.max_new_tokens, shape.context - 1)
    prompt = config.data.max_prompt_tokens or PROMPT
    return min(prompt, shape.context - new), min(prompt + new, shape.context)


def shares_weights(options: Any, config: Config) -> bool:
    """Whether the engine samples with the trainer's own weights."""
    embedded = isinstance(options, HFEngineOptions | RecordedOptions)
    return embedded and not options.copy_weights and not config.rollout.staleness


def utilization(options: Common) -> float:
    """The share of a GPU's memory that vLLM is told to take."""
    return float(options.engine_args.get("gpu_memory_utilization", options.gpu_memory_utilization))


def engine_memory(
    options: Any, shape: Shape, config: Config, devices: Devices, ranks: int, sampled: bool
) -> EngineMemory:
    """What the engine with these options takes for a stage; `sampled`: whether the stage samples."""
    if isinstance(options, VLLMOptions):
        return _vllm(options, shape, config, devices)
    if isinstance(options, VLLMServerOptions):
        return _servers(options, shape, config, devices)
    if not sampled or not isinstance(options, HFEngineOptions):
        return EngineMemory()  # an engine of the user's own is not known
    return _embedded(options, shape, config, ranks)


def _in_vllm(options: Common, shape: Shape, config: Config) -> Parts:
    """What one copy of the model has to have on each of its devices: weights, and the cache of one longest sequence."""
    split = options.tensor_parallel_size
    width = torch.finfo(dtype_of(config.model)).bits // 8
    _, length = lengths(shape, config)
    # vLLM 0.32 quantises linear layers and experts one by one as their weights arrive, not the embeddings and the LM head
    # (model_executor/layers/quantization/online); scales are less than a hundredth
    saved = 0 if options.quantization is None else (width - 1) * shape.linear
    cached = 1 / width if options.kv_cache_dtype.startswith("fp8") else 1.0
    return {
        "weights": (width * shape.parameters - saved) / split,
        "keys and values of one sequence": length * shape.keys_and_values * cached / split,
        "work": WORK,
    }


def _on_cpu(options: Common, shape: Shape, config: Config, copies: float) -> EngineMemory:
    """`copies`: of the model, for each device."""
    cache = (CPU_CACHE if options.kv_cache_gib is None else options.kv_cache_gib) * GIB
    width = torch.finfo(dtype_of(config.model)).bits // 8
    each = PROGRAM + width * shape.parameters + cache
    return EngineMemory(has_weights=True, always={"engine": copies * each})


def _vllm(options: VLLMOptions, shape: Shape, config: Config, devices: Devices) -> EngineMemory:
    if not devices.on_gpu:
        return _on_cpu(options, shape, config, 1)
    inside = _in_vllm(options, shape, config)
    demanded = utilization(options) * devices.memory
    share = demanded
    if options.kv_cache_gib is not None:
        share = inside["weights"] + WORK + options.kv_cache_gib * GIB
    return EngineMemory(
        program=CONTEXT,
        has_weights=True,
        sleeps=options.sleep and not config.rollout.staleness,
        awake={ENGINE: share},
        demanded={ENGINE: demanded},
        inside=inside,
        share=share,
    )


def _servers(options: VLLMServerOptions, shape: Shape, config: Config, devices: Devices) -> EngineMemory:
    if options.urls:
        return EngineMemory(has_weights=True)
    if not devices.on_gpu:
        # all of them on the machine of rank 0, whose memory its ranks share
        return _on_cpu(options, shape, config, options.servers * options.data_parallel_size / devices.sharing)
    share = utilization(options) * devices.memory  # of GPUs of their own
    return EngineMemory(has_weights=True, inside=_in_vllm(options, shape, config), share=share)


def _embedded(options: HFEngineOptions, shape: Shape, config: Config, ranks: int) -> EngineMemory:
    prompt, length = lengths(shape, config)
    rollout = config.rollout
    rows = math.ceil(rollout.prompts_per_step * rollout.group_size * (1 + rollout.staleness) / ranks)
    rows = min(rows, options.max_rows)
    prefill = min(options.prefill_tokens, rollout.prompts_per_step * prompt)
    half = dtype_of(config.model) == torch.bfloat16
    sampling = {
        "keys and values": rows * length * shape.keys_and_values,
        "logits": rows * shape.vocabulary * 4 * LOGITS_COPIES,
        "activations": layer_bytes(shape, config.model, prefill),
        # autocast copies the float32 weights in every pass
        "weights in bfloat16": 2 * shape.trained if half else 0,
    }
    own = not shares_weights(options, config)
    return EngineMemory(has_weights=own, always={"engine's weights": shape.weights if own else 0}, sampling=sampling)
