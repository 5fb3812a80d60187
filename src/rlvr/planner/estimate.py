"""What a run needs of its device's memory, before any weight is loaded: an estimate from shapes, part by part.

The model is built without storage (torch's meta device), so that parameters are counted, not guessed, for every architecture;
what a forward pass keeps for the backward pass is counted on a few tokens in the same way, and grows linearly with tokens.
Every completion is taken to be as long as it may be, so the estimate is of the worst step. Not counted: fragmentation, shared
prompts (which need less), and what verifiers take in processes of their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from rlvr import registry
from rlvr.config import Config, ModelConfig
from rlvr.losses.reference import compares_with_reference
from rlvr.planner.micro_batch import LOGITS_COPIES, layer_bytes, micro_batch_bytes
from rlvr.planner.shape import Shape
from rlvr.policy.loading import device_of

GIB = 1 << 30
PROGRAM = 550 << 20
"""Python, torch and transformers themselves, as measured; on a GPU, about what its context takes."""
PROMPT = 512
"""Tokens that a prompt is taken to have where no setting bounds it."""
STATE = {"adamw": 8.0, "adamw_8bit": 2.1, "sgd": 4.0}
"""Bytes of optimizer state for a trained weight; others are taken to be like adamw."""

SMALLER = {
    "weights": "a smaller model, or model.adapter",
    "gradients": "model.adapter",
    "optimizer": "optim.optimizer=adamw_8bit, or model.adapter",
    "reference": "algorithm.kl=null and a loss without a reference, or model.adapter",
    "engine's weights": "rollout.staleness=0 with the hf engine, or a smaller model",
    "activations": "optim.micro_batch_tokens, or model.gradient_checkpointing=true",
    "logits": "optim.micro_batch_tokens",
    "keys and values": "rollout.engine's max_rows, rollout.group_size or rollout.max_new_tokens",
    "engine": "rollout.engine's gpu_memory_utilization or kv_cache_gib",
}
"""Part -> the keys that make it smaller."""


def parts(shape: Shape, config: Config, sampled: bool = True, reference: bool | None = None) -> dict[str, float]:
    """Bytes by what they are for, in the worst step of a stage: its update or, where that needs more, its sampling.

    Of activations, logits and keys and values only those of the larger of the two are there, unless sampling and update
    overlap (`rollout.staleness`). `sampled`: whether the stage samples; `reference`: whether it keeps a reference, by default
    what a stage that samples does under `config.algorithm`.
    """
    if reference is None:
        reference = sampled and compares_with_reference(config.algorithm)
    always: dict[str, float] = {
        "program": PROGRAM,
        "weights": shape.weights,
        "gradients": 4 * shape.trained,
        "reference": 4 * shape.trained if reference else 0,
    }
    update = _update(shape, config, sampled)
    state = {"optimizer": _state(config.optim.optimizer) * shape.trained}
    if config.distributed.offloads_during_rollout:
        update = state | update
    else:
        always |= state
    sampling, engine = _sampling(shape, config) if sampled else ({}, {})
    if sampled and config.rollout.staleness:
        extra = {key: update.get(key, 0) + sampling.get(key, 0) for key in dict.fromkeys([*update, *sampling])}
    else:
        extra = max(update, sampling, key=lambda found: sum(found.values()))
    return {key: size for key, size in {**always, **engine, **extra}.items() if size}


def _state(optimizer: str | dict[str, Any]) -> float:
    """Bytes of optimizer state for a trained weight."""
    options = {"name": optimizer} if isinstance(optimizer, str) else optimizer
    if options["name"] == "sgd" and not options.get("momentum"):
        return 0.0
    return STATE.get(options["name"], STATE["adamw"])


def lengths(shape: Shape, config: Config) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest sequence, as far as the settings bound them."""
    new = min(config.rollout.max_new_tokens, shape.context - 1)
    prompt = config.data.max_prompt_tokens or PROMPT
    return min(prompt, shape.context - new), min(prompt + new, shape.context)


def _update(shape: Shape, config: Config, sampled: bool) -> dict[str, float]:
    """Of one micro-batch."""
    prompt, length = lengths(shape, config)
    optim, rollout = config.optim, config.rollout
    rows = rollout.prompts_per_step * (rollout.group_size if sampled else 1)
    rows = math.ceil(rows / min(optim.updates_per_batch, rollout.prompts_per_step))
    tokens = rows * length
    if optim.micro_batch_tokens is not None:
        tokens = min(tokens, max(length, optim.micro_batch_tokens))
    elif optim.micro_batch_size is not None:
        tokens = min(rows, optim.micro_batch_size) * length
    trained = tokens * (length - prompt) / length
    return micro_batch_bytes(shape, config.model, tokens, trained, length)


def _sampling(shape: Shape, config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """What sampling takes while it samples, and what the engine takes all the time."""
    options = registry.build("engine", config.rollout.engine)
    prompt, length = lengths(shape, config)
    rollout, ahead = config.rollout, config.rollout.staleness > 0
    rows = rollout.prompts_per_step * rollout.group_size * (1 + rollout.staleness)
    if hasattr(options, "gpu_memory_utilization"):
        if hasattr(options, "urls") and (options.urls or options.devices):
            return {}, {}  # on other devices
        if device_of(config.model).type == "cpu":
            return {}, {"engine": shape.weights + (options.kv_cache_gib or 1.0) * GIB + PROGRAM}
        share = {"engine": options.gpu_memory_utilization * device_memory(config.model)}
        return (share, {}) if getattr(options, "sleep", False) and not ahead else ({}, share)
    own = getattr(options, "copy_weights", False) or ahead
    rows = min(rows, getattr(options, "max_rows", rows))
    prefill = min(getattr(options, "prefill_tokens", math.inf), rollout.prompts_per_step * prompt)
    sampling = {
        "keys and values": rows * length * shape.keys_and_values,
        "logits": rows * shape.vocabulary * 4 * LOGITS_COPIES,
        "activations": layer_bytes(shape, config.model, prefill),
    }
    return sampling, {"engine's weights": shape.weights if own else 0}


def device_memory(config: ModelConfig) -> int:
    """Bytes of memory of the model's device; of the machine where that is the CPU."""
    device = device_of(config)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def advice(needed: Mapping[str, float], available: float) -> str | None:
    """Why the parts do not fit and which keys make the largest two smaller; None where they fit."""
    total = sum(needed.values())
    if total <= available:
        return None
    largest = sorted((key for key in needed if key in SMALLER), key=lambda key: -needed[key])[:2]
    keys = "; ".join(f"{key}: {SMALLER[key]}" for key in largest)
    return f"does not fit: {total / GIB:.1f} GiB of {available / GIB:.1f} GiB. To make it smaller: {keys}"
