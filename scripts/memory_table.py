"""The table of docs/memory.md: for published sizes, numbers of GPUs and lengths of responses, the first settings of a
list that fit. `scripts/make_docs.py` writes it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from rlvr.config import ComponentSpec, Config
from rlvr.config.stage_plan import StagePlan
from rlvr.planner.engine_memory import ENGINE
from rlvr.planner.planned_devices import Devices
from rlvr.planner.planner import Planner

MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B")
COUNTS = (1, 2, 8, 16, 64)
RESPONSES = (2048, 8192, 32768)
# 80 GB as a datasheet writes them (10^9 bytes), 74.5 GiB: a little less than an H100's 79.2 GiB, so that what fits here
# fits there.
GPU = 80e9
"""Bytes of a GPU of the table."""

# Short names of the settings in a row's cells.
MOVED = {"offload_during_rollout": True}
OFFLOADED = {"model": {"activation_offload": True}}
LORA = {"adapter": {"r": 16}}
QLORA = LORA | {"quantization": "nf4"}
HF = ComponentSpec("hf", {"max_rows": 32})


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"distributed": {"backend": "deepspeed", "zero_stage": stage, **more}}


def _ways(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the configurations to try on so many GPUs, from the smallest change of a plain run to the largest."""
    yield "plain", {}
    yield "plain, moved", {"distributed": MOVED}
    if count > 1:
        yield "ZeRO 2", _zero(2)
        yield "ZeRO 2, moved", _zero(2, **MOVED)
        yield "ZeRO 3", _zero(3)
        yield "ZeRO 3, moved", _zero(3, **MOVED)
        yield "ZeRO 3, moved, inputs", _zero(3, **MOVED) | OFFLOADED
    yield "ZeRO 3, optimizer in host", _zero(3, offload="optimizer")
    yield "ZeRO 3, optimizer in host, inputs", _zero(3, offload="optimizer") | OFFLOADED
    if count > 1:
        for split in (2, 4, 8):
            if split < count:
                servers = {"rollout": {"engine": {"name": "vllm-server", "tensor_parallel_size": split}}}
                yield f"server of {split}, ZeRO 3", _zero(3) | servers
                yield (
                    f"server of {split}, ZeRO 3, optimizer in host, inputs",
                    _zero(3, offload="optimizer") | OFFLOADED | servers,
                )
    yield "LoRA", {"model": LORA}
    yield "LoRA, inputs", {"model": LORA | OFFLOADED["model"]}
    yield "QLoRA", {"model": QLORA}
    yield "LoRA, hf", {"model": LORA, "rollout": {"engine": HF}}
    yield "QLoRA, hf", {"model": QLORA, "rollout": {"engine": HF}}
    if count > 1:
        yield "LoRA, server of 1", {"model": LORA, "rollout": {"engine": "vllm-server"}}


def cell(model: str, count: int, response: int, planners: dict[int, Planner]) -> str:
    """The first settings that fit."""
    planner = planners[count]
    for label, changes in _ways(count):
        tree: dict[str, Any] = {
            "run": {"steps": 1},
            "data": {"train": "arithmetic", "max_prompt_tokens": 1024},
            **changes,
            "model": {"path": model} | changes.get("model", {}),
            "rollout": {"prompts_per_step": 64, "max_new_tokens": response, "engine": "vllm"}
            | changes.get("rollout", {}),
        }
        stages = planner.stages(Config(**tree))
        for tried, share in _shares(planner, stages):
            resolved = planner.resolved(tried)
            if planner.fits(resolved):
                return f"{label}{share}: {_micro_batches(planner, resolved)}"
    return "-"


def _shares(planner: Planner, stages: list[StagePlan]) -> Iterator[tuple[list[StagePlan], str]]:
    """With vLLM's own share of the GPU, and with the least that holds its weights and one sequence."""
    yield stages, ""
    engine = stages[0].config.rollout.engine
    if engine == HF:
        return
    (plan,) = planner.plans(planner.resolved(stages))
    inside = next(phase for phase in plan.phases if phase.name == ENGINE)
    # In twentieths of the GPU, as a user would write it.
    share = math.ceil(20 * inside.total / (1 - planner.margin) / GPU) / 20
    if engine.name == "vllm" and share < 1:
        rollout = stages[0].config.rollout.model_copy(
            update={"engine": ComponentSpec("vllm", {"gpu_memory_utilization": share})}
        )
        config = stages[0].config.model_copy(update={"rollout": rollout})
        yield [stages[0].model_copy(update={"config": config})], f", share {share}"


def _micro_batches(planner: Planner, stages: list[StagePlan]) -> str:
    (plan,) = planner.plans(stages)
    if stages[0].config.model.checkpoints_activations:
        recomputed = ", recomputed"
    else:
        recomputed = ""
    return f"{plan.tokens / 1024:.0f}k{recomputed}"


def memory_table() -> str:
    """The table in Markdown, a row for each model and length of responses."""
    lines = [
        "| model | responses | " + " | ".join(f"{count} GPU{'s' if count > 1 else ''}" for count in COUNTS) + " |",
        "|---|---|" + "---|" * len(COUNTS),
    ]
    return "\n".join([*lines, *(row for model in MODELS for row in rows(model))])


@functools.cache
def rows(model: str) -> list[str]:
    """The rows of a model, one for each length of responses."""
    shapes: dict[str, Any] = {}
    planners = {count: Planner(Devices(count, GPU), shapes=shapes) for count in COUNTS}
    lines = []
    for response in RESPONSES:
        cells = [cell(model, count, response, planners) for count in COUNTS]
        lines.append(f"| {model.split('-')[-1]} | {response // 1024}k | " + " | ".join(cells) + " |")
    return lines
