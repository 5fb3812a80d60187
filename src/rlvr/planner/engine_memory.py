"""Memory of the engine that samples, on a device that is trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from rlvr.config import Config
from rlvr.planner.micro_batch import LOGITS_COPIES, layer_bytes, scoring_bytes
from rlvr.planner.planned_devices import GIB, Devices
from rlvr.planner.sampled import Sampled, in_training
from rlvr.planner.shape import MemoryParts, Shape
from rlvr.policy.loading import dtype_of
from rlvr.rollout.hf import HFEngineOptions
from rlvr.rollout.recorded_rollouts import RecordedOptions
from rlvr.rollout.rows import GROWTH
from rlvr.rollout.vllm.options import VLLMOptions, VLLMServerOptions
from rlvr.rollout.vllm.settings import CommonSettings

# Resident memory after the imports was 482 MiB on one machine (docs/log.md, 2026-11-23); the rest is for the tokenizer
# and for what the first operations allocate.
PROGRAM = 550 << 20
"""Python, torch and transformers themselves, as measured on a CPU."""
# An estimate that no GPU has confirmed yet (docs/gpu.md).
CONTEXT = 2 * GIB
"""vLLM's GPU context and CUDA graphs, which stay while it sleeps."""
# VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE is 394 MiB in vllm/envs.py of 0.32; the rest is for cuBLAS, whose workspace is
# tens of MiB. FlashAttention needs less.
WORKSPACE = GIB // 2
"""Buffers of vLLM's attention kernels and of matrix products."""
# 2 + 4 * 4 bytes: one copy in bfloat16, four in float32.
LOGIT = 18
"""Bytes for each logit while vLLM samples: the logits in bfloat16 and in float32, and in float32 their log-probs,
probabilities and noise (vllm/v1/sample, logprobs_mode processed_logprobs)."""
IN_FLIGHT = 2
"""Batches of vLLM's scheduler that are under way at once (its asynchronous scheduling)."""
BLOCK = 16
"""Tokens of a block of vLLM's cache."""
# Both bounds are in EngineArgs.get_batch_defaults (vllm/engine/arg_utils.py, 0.32). An A100 of 80 GB is excepted from
# the larger batches there; a plan knows sizes and no names, so it takes too much for an A100, which is the safe side.
LARGE_GPU = 70 * GIB
"""From this memory on, the defaults of vLLM's server are larger batches (H100, H200)."""
HUGE_GPU = 160 * GIB
"""From this memory on, the defaults of vLLM's server are the largest batches (B200, B300)."""
# The value that the vllm engine sets on a CPU (rlvr.rollout.vllm.launch).
CPU_CACHE = 1.0
"""GiB of keys and values that vLLM takes on a CPU where nothing else is set."""
ENGINE = "vLLM's share"


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the engine by part, on a device that also trains."""

    program: float = 0.0
    """Bytes of its process, all the time."""
    has_weights: bool = False
    """True if weights are sent to the engine."""
    sleeps: bool = False
    """True if the engine gives `awake` back outside of publish and sampling."""
    awake: MemoryParts = field(default_factory=dict)
    always: MemoryParts = field(default_factory=dict)
    demanded: MemoryParts = field(default_factory=dict)
    """Bytes at its start, when the trainer's weights are loaded."""
    sampling: MemoryParts = field(default_factory=dict)
    evaluating: MemoryParts = field(default_factory=dict)
    inside: MemoryParts = field(default_factory=dict)
    """Parts that have to fit into vLLM's `share` of a GPU."""
    share: float = 0.0


def shares_weights(options: Any, config: Config) -> bool:
    """True where the engine samples with the trainer's own weights."""
    # With staleness the engine samples while the trainer updates, so it needs weights of its own.
    embedded = isinstance(options, HFEngineOptions | RecordedOptions)
    return embedded and not options.copy_weights and not config.rollout.staleness


def utilization(options: CommonSettings) -> float:
    """`gpu_memory_utilization`: the share of a GPU's memory that vLLM may take."""
    return float(options.engine_args.get("gpu_memory_utilization", options.gpu_memory_utilization))


def engine_memory(
    options: Any, shape: Shape, config: Config, devices: Devices, ranks: int, sampled: bool, evaluated: Sampled | None
) -> EngineMemory:
    """Memory that the engine with these options takes for a stage; `sampled`: whether the stage samples, `evaluated`:
    what its evaluations do."""
    trained = in_training(shape, config)
    longest = max(trained.length, evaluated.length if evaluated else 0)
    if isinstance(options, VLLMOptions):
        return _vllm(options, shape, config, devices, longest)
    if isinstance(options, VLLMServerOptions):
        return _servers(options, shape, config, devices, longest)
    if not isinstance(options, HFEngineOptions) or not (sampled or evaluated):
        return EngineMemory()  # an engine of the user's own is not known
    own = not shares_weights(options, config)
    return EngineMemory(
        has_weights=own,
        always={"engine's weights": shape.weights if own else 0},
        sampling=_embedded(options, shape, config, devices, ranks, trained) if sampled else {},
        evaluating=_embedded(options, shape, config, devices, ranks, evaluated) if evaluated else {},
    )


def batch_limits(options: CommonSettings, devices: Devices) -> tuple[int, int]:
    """Tokens and sequences that vLLM computes in one step at most: as set, or as its own server chooses for the device
    (vLLM 0.32, EngineArgs.get_batch_defaults)."""
    # vLLM's defaults on a CPU for one rank.
    tokens = 2048
    sequences = 128
    if devices.on_gpu:
        large = devices.memory >= LARGE_GPU
        tokens = 8192 if large else 2048
        sequences = 1024 if large else 256
        if devices.memory >= HUGE_GPU:
            tokens = 16384
    tokens = int(options.engine_args.get("max_num_batched_tokens", options.max_num_batched_tokens) or tokens)
    sequences = int(options.engine_args.get("max_num_seqs", options.max_num_seqs) or sequences)
    return tokens, min(sequences, tokens)


def work_bytes(options: CommonSettings, shape: Shape, config: Config, devices: Devices) -> float:
    """Bytes that vLLM takes beside weights, keys and values. Its profile run at the start has a batch of the most
    tokens go through the layers, then as many sequences as there may be sample, and what that takes is not given to the
    cache. A split model's activations are counted whole."""
    tokens, sequences = batch_limits(options, devices)
    drafted = int((options.speculative_config or {}).get("num_speculative_tokens", 0))
    width = torch.finfo(dtype_of(config.model)).bits // 8
    # Rows of logits: one for each sequence and one for each drafted token, but no more than tokens in a step; and the
    # hidden states of all tokens in front of the LM head.
    sampled = min(sequences * (1 + drafted), tokens) * shape.vocabulary * LOGIT + tokens * shape.hidden * width
    # Not the sum: activations of the layers are freed before the logits are made.
    return WORKSPACE + max(layer_bytes(shape, config.model, tokens), sampled)


def cached_bytes(shape: Shape, length: int, in_flight: int) -> float:
    """Keys and values of a sequence of `length` tokens in vLLM's cache. A layer with a sliding window keeps those in
    the window and of `in_flight` tokens that are under way (vLLM 0.32, SlidingWindowSpec)."""
    each = shape.keys_and_values / shape.layers
    kept = length
    if shape.windowed:
        # The window less the token itself, the tokens of batches under way, and one block more, since a window may
        # begin inside of one.
        kept = min(length, shape.window - 1 + in_flight + BLOCK)
    return each * ((shape.layers - shape.windowed) * length + shape.windowed * kept)


def _in_vllm(options: CommonSettings, shape: Shape, config: Config, devices: Devices, longest: int) -> MemoryParts:
    """The least that one copy of the model needs on each of its devices: weights, the cache of one longest sequence,
    and work."""
    split = options.tensor_parallel_size
    width = torch.finfo(dtype_of(config.model)).bits // 8
    length = options.max_model_len or longest
    tokens, _ = batch_limits(options, devices)
    # vLLM 0.32 quantises linear layers and experts one by one as their weights arrive, not the embeddings and the LM
    # head (model_executor/layers/quantization/online); scales are less than a hundredth
    saved = 0
    if options.quantization is not None:
        # fp8: one byte for each weight of a linear layer in the place of `width`.
        saved = (width - 1) * shape.linear
    cached = 1.0
    if options.kv_cache_dtype.startswith("fp8"):
        # shape.keys_and_values is counted in the type computed in; in fp8 each number is one byte.
        cached = 1 / width
    return {
        "weights": (width * shape.parameters - saved) / split,
        "keys and values of one sequence": cached * cached_bytes(shape, length, IN_FLIGHT * tokens) / split,
        "work": work_bytes(options, shape, config, devices),
    }


def _on_cpu(options: CommonSettings, shape: Shape, config: Config, copies: float) -> EngineMemory:
    """`copies`: of the model, for each device."""
    cache = (CPU_CACHE if options.kv_cache_gib is None else options.kv_cache_gib) * GIB
    width = torch.finfo(dtype_of(config.model)).bits // 8
    # A process of its own, which holds the whole model.
    each = PROGRAM + width * shape.parameters + cache
    return EngineMemory(has_weights=True, always={"engine": copies * each})


def _vllm(options: VLLMOptions, shape: Shape, config: Config, devices: Devices, longest: int) -> EngineMemory:
    if not devices.on_gpu:
        return _on_cpu(options, shape, config, 1)
    inside = _in_vllm(options, shape, config, devices, longest)
    # vLLM refuses to start unless this share is free, however little of it the cache takes later.
    demanded = utilization(options) * devices.memory
    share = demanded
    if options.kv_cache_gib is not None:
        share = inside["weights"] + inside["work"] + options.kv_cache_gib * GIB
    return EngineMemory(
        program=CONTEXT,
        has_weights=True,
        sleeps=options.sleep and not config.rollout.staleness,
        awake={ENGINE: share},
        demanded={ENGINE: demanded},
        inside=inside,
        share=share,
    )


def _servers(options: VLLMServerOptions, shape: Shape, config: Config, devices: Devices, longest: int) -> EngineMemory:
    if options.urls:
        return EngineMemory(has_weights=True)
    if not devices.on_gpu:
        # all of them on the machine of rank 0, whose memory its ranks share
        return _on_cpu(options, shape, config, options.servers * options.data_parallel_size / devices.sharing)
    share = utilization(options) * devices.memory  # of GPUs of their own
    return EngineMemory(has_weights=True, inside=_in_vllm(options, shape, config, devices, longest), share=share)


def rows_at_once(options: HFEngineOptions, ranks: int, sampled: Sampled) -> int:
    """Responses that the embedded engine of a rank decodes at once."""
    return min(math.ceil(sampled.responses / ranks), options.max_rows)


def _embedded(
    options: HFEngineOptions, shape: Shape, config: Config, devices: Devices, ranks: int, sampled: Sampled
) -> MemoryParts:
    """Memory that the embedded engine takes while it samples."""
    rows = rows_at_once(options, ranks, sampled)
    # one prompt is read whole, however long
    prefill = max(sampled.prompt, min(options.prefill_tokens, math.ceil(sampled.prompts / ranks) * sampled.prompt))
    half = dtype_of(config.model) == torch.bfloat16
    gpu_memory = devices.memory if devices.on_gpu else None
    reordered = shape.layers * shape.queries * shape.hidden if shape.frozen else 0
    return {
        # every layer keeps all tokens, those with a sliding window too (rlvr.rollout.rows)
        # GROWTH: tokens by which a full cache is enlarged.
        "keys and values": rows * (sampled.length + GROWTH) * shape.keys_and_values,
        "logits": rows * shape.vocabulary * 4 * LOGITS_COPIES,
        "activations": scoring_bytes(shape, config.model, prefill, sampled.prompt, gpu_memory),
        # What trains is cast, or copied to be joined; of weights that do not, the output projections of attention alone
        # are copied, in another order (rlvr.rollout.joined_weights).
        "weights in bfloat16": 2 * (shape.trained + reordered) if half else 0,
    }
