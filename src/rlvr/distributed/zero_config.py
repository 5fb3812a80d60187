"""The configuration that DeepSpeed gets: ours, and under it what the user's own file adds.

Everything that our options or exact gradients decide is ours. A user's file (`distributed.deepspeed`) may hold those
keys too, as long as they say the same; `auto` says nothing. Each one that differs is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rlvr.errors import ConfigError

Offload = Literal["none", "optimizer", "parameters"]

OWN_SECTIONS = {
    "train_batch_size": "sizes are `rollout.*` and `optim.micro_batch_*`",
    "train_micro_batch_size_per_gpu": "sizes are `rollout.*` and `optim.micro_batch_*`",
    "gradient_accumulation_steps": "sizes are `rollout.*` and `optim.micro_batch_*`",
    "gradient_clipping": "it is `optim.max_grad_norm`",
    "optimizer": "the optimizer is `optim.optimizer`",
    "scheduler": "the schedule is `optim.schedule`",
    "fp16": "`model.dtype` is float32 or bfloat16",
    "amp": "`model.dtype` says what is computed in",
    "torch_autocast": "`model.dtype` says what is computed in",
    "activation_checkpointing": "it is `model.gradient_checkpointing`",
    "data_efficiency": "tasks are drawn by `data.sampler`",
    "curriculum_learning": "tasks are drawn by `data.sampler`",
    "tensor_parallel": "the backend is data parallel with ZeRO only",
    "sequence_parallel_size": "the backend is data parallel with ZeRO only",
    "compile": "it is not supported",
}
"""Keys of DeepSpeed's configuration that have no place in a user's file, unless off or `auto`, and why."""


def zero_config(
    zero_stage: int, offload: Offload, bfloat16: bool, ranks: int, user_file: str | None = None, weights: int = 1 << 30
) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of so many `weights` that train.

    ConfigError names each key of `user_file` that contradicts it.
    """
    ours = _ours(zero_stage, offload, bfloat16, ranks)
    if user_file is None:
        return _over(_defaults(zero_stage, weights), ours)
    theirs = _read(user_file)
    if wrong := list(_conflicts(theirs, ours)):
        raise ConfigError(f"distributed.deepspeed: {user_file} contradicts the run's configuration: {'; '.join(wrong)}")
    return _over(_over(_defaults(zero_stage, weights), _without_auto(theirs)), ours)


def _ours(zero_stage: int, offload: Offload, bfloat16: bool, ranks: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": zero_stage, "offload_optimizer": None, "offload_param": None}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    return {
        # one pass of one sample each: sizes and windows are the learner's, DeepSpeed is told where a step ends
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,  # set anew for each step
        # One plain average over ranks, which `DeepSpeedBackend.backward` undoes by a factor; other scalings would have
        # to be undone otherwise.
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        # DeepSpeed knows its own optimizers and some of torch's; ours come from a registry.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # ours is torch's, which needs no compiler
        "bf16": {"enabled": bfloat16},
        # In bfloat16 a sum over micro-batches would lose what is under 1/256 of it.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
    }


def _defaults(zero_stage: int, weights: int) -> dict[str, Any]:
    """Return the settings that a user's file may change."""
    # DeepSpeed's own bucket is half a billion elements, whatever the model, and it is allocated at once.
    # Elements. At most 100 MB in bfloat16, at least 65,536 for tiny models of tests; a sixteenth of the model in
    # between. Not measured.
    bucket = min(50_000_000, max(1 << 16, weights // 16))
    zero: dict[str, Any] = {
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "round_robin_gradients": False,
    }
    if zero_stage == 3:
        # DeepSpeed's own values keep a billion weights whole; these keep a few layers of a 7B model.
        zero |= {
            "stage3_max_live_parameters": 300_000_000,
            "stage3_max_reuse_distance": 100_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            # Elements: norms and biases stay whole on every rank, since fetching each costs more than it frees.
            "stage3_param_persistence_threshold": 10_000,
            "memory_efficient_linear": False,  # it would replace torch's own function for every model of the process
        }
    # 1 << 40: never; the run has a log of its own.
    return {"zero_optimization": zero, "steps_per_print": 1 << 40, "wall_clock_breakdown": False}


def _read(user_file: str) -> dict[str, Any]:
    path = Path(user_file).expanduser()
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"distributed.deepspeed: {user_file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"distributed.deepspeed: {user_file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"distributed.deepspeed: {user_file} must hold a JSON object")
    return found


def _conflicts(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in theirs.items():
        name = f"{prefix}{key}"
        # `auto` is what Hugging Face's configurations hold for values that the trainer fills in: no contradiction.
        off = value in ("auto", None) or _off(value)
        if not prefix and key in OWN_SECTIONS:
            if not off and value is not False:
                yield f"`{name}` has no place in it ({OWN_SECTIONS[key]})"
        elif key not in ours or value == "auto" or (ours[key] is None and off):
            continue
        elif isinstance(value, Mapping) and isinstance(ours[key], Mapping):
            yield from _conflicts(value, ours[key], f"{name}.")
        # Offload to "none" or to nothing is off on both sides (`_off`), all else is a contradiction.
        elif ours[key] is None:
            yield f"`{name}` is {json.dumps(value)} there and off here (`distributed.offload`)"
        elif value != ours[key]:
            yield f"`{name}` is {json.dumps(value)} there and {json.dumps(ours[key])} here"


def _off(section: Any) -> bool:
    return isinstance(section, Mapping) and (section.get("enabled") is False or section.get("device") == "none")


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _without_auto(v) if isinstance(v, Mapping) else v for k, v in values.items() if v != "auto"}


def _over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` laid over `base`, key by key; None takes a key away."""
    merged = dict(base)
    for key, value in top.items():
        below = base.get(key)
        if isinstance(value, Mapping):
            merged[key] = _over(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    # DeepSpeed takes a present key with null for a section without values.
    return {key: value for key, value in merged.items() if value is not None}
