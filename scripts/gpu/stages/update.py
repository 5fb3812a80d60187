"""Stage 4: whole optimizer steps of real shapes with random weights: peak memory against the plan, time, FLOP/s, a
profile."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from rlvr.config.config_loading import load_config
from rlvr.distributed import PlainBackend
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, Objective, ObjectiveTerm
from rlvr.policy.flops import UpdateFlops, peak_flops
from rlvr.records import Batch
from stages.context import Context, SkipError, free_memory
from stages.measuring import matrix_rate, milliseconds, peak_memory
from stages.models import load, made_up, model_section, parameters
from stages.planned import planned_parts

PROMPT, RESPONSE = 512, 1536
TOY_PROMPT, TOY_RESPONSE = 8, 24
ROWS = 15
"""Operations of a profile that are kept."""


@dataclass(frozen=True)
class Case:
    """A model, and the micro-batches that it is measured with."""

    model: str
    tokens: tuple[int, ...]
    """Tokens of the one micro-batch of a step; the first is worth most."""
    checkpointing: bool
    adapter: bool = False
    group: int = 1
    """Rollouts that share a prompt, which is computed once for them."""
    profiled: bool = False
    fused_layers: bool = False
    """By Liger's kernels for norms, rotary embedding and SwiGLU."""
    compiled: bool = False
    """By torch.compile of each layer."""

    @property
    def name(self) -> str:
        """How results call it."""
        marks = {
            "LoRA": self.adapter,
            "checkpointed": self.checkpointing,
            f"groups of {self.group}": self.group > 1,
            "Liger": self.fused_layers,
            "compiled": self.compiled,
        }
        return " ".join([self.model, *(mark for mark, on in marks.items() if on)])


CASES = (
    Case("0.5B", (16384, 4096), checkpointing=False, profiled=True),
    Case("0.5B", (16384, 32768), checkpointing=True),
    Case("1.5B", (16384, 4096, 32768), checkpointing=True),
    Case("7B", (16384, 4096, 32768), checkpointing=True, adapter=True),
    Case("0.5B", (16384,), checkpointing=True, group=8),
    Case("0.5B", (16384,), checkpointing=False, fused_layers=True),
    Case("0.5B", (16384,), checkpointing=False, compiled=True),
)


def run(context: Context) -> None:
    """Measure every case at every size."""
    rate = matrix_rate(context.device, torch.bfloat16, 256 if context.toy else 8192)
    context.record("bfloat16 matrix product", {"tflops": round(rate / 1e12, 3)})
    for case in CASES:
        context.measure(f"{case.name}/all", measure_case, context, case, rate, expected=2.0 if context.toy else 25.0)


def measure_case(context: Context, case: Case, rate: float) -> dict[str, Any]:
    """Every size of a case, with one loading of its model, each a result of its own; returns what was loaded."""
    adapter = {"adapter": {"r": 4 if context.toy else 16}} if case.adapter else {}
    if case.fused_layers and context.toy:
        raise SkipError("Liger's kernels need a GPU")
    if case.fused_layers and importlib.util.find_spec("liger_kernel") is None:
        raise SkipError("liger-kernel is not installed")
    layers = {
        "gradient_checkpointing": case.checkpointing,
        "fused_layers": case.fused_layers,
        "compile": case.compiled,
    }
    section = model_section(context, case.model, **layers, **adapter)
    policy = load(section)
    backend = PlainBackend(policy)
    prompt, response = (TOY_PROMPT, TOY_RESPONSE) if context.toy else (PROMPT, RESPONSE)
    for tokens in case.tokens:
        rollouts = tokens // (PROMPT + RESPONSE)
        batch = made_up(policy, rollouts, prompt, response, case.group)
        arguments = (context, backend, batch, rate)
        found = context.measure(f"{case.name}/{tokens}", updated, *arguments, expected=1.0 if context.toy else 10.0)
        context.measure(f"{case.name}/{tokens} plan", compared, section, batch, case.group, found)
        if case.profiled and tokens == case.tokens[0]:
            context.measure(f"{case.name}/{tokens} profile", profile, context, backend, batch)
    return parameters(policy)


def step(backend: PlainBackend, batch: Batch) -> tuple[dict[str, float | None], UpdateFlops]:
    """One optimizer step of the learner, in one micro-batch: its metrics, and what it computed."""
    loss = ObjectiveTerm("policy", ClippedPolicyLoss(0.2, 0.2, "tokens"), "policy", zero_without_advantage=True)
    config = load_config({}).optim
    learner = Learner(backend)
    return learner.update(batch, Objective((loss,), 1.0), config, 1e-6), learner.computed


def updated(context: Context, backend: PlainBackend, batch: Batch, rate: float) -> dict[str, float | None]:
    """Seconds, peak memory and FLOP/s of a step; FLOPs as the metric `mfu/update` counts them."""
    metrics, computed = step(backend, batch)
    with peak_memory(context.device) as peak:
        step(backend, batch)
    held = torch.cuda.memory_allocated() / 2**20 if context.device == "cuda" else None
    ms = milliseconds(lambda: step(backend, batch), context.device, repeats=1 if context.toy else 3)
    peak_rate = peak_flops(torch.cuda.get_device_name()) if context.device == "cuda" else None
    rollout_tokens = sum(len(rollout) for rollout in batch.rollouts)
    return {
        "ms": ms,
        "computed_tokens": computed.tokens,
        "tokens_per_second": round(1000 * rollout_tokens / ms, 1),
        "peak_mib": peak.mib,
        "held_mib": held,
        "tflops": round(computed.flops / ms / 1e9, 3),
        "mfu": None if peak_rate is None else round(1000 * computed.flops / ms / peak_rate, 4),
        "share_of_matrix_product": round(1000 * computed.flops / ms / rate, 4),
        "loss": metrics["loss/total"],
        "grad_norm": metrics["grad_norm"],
    }


def compared(section: dict[str, Any], batch: Batch, group: int, found: dict[str, Any] | None) -> dict[str, Any]:
    """The plan's parts for such a step, their sum, and the measured peak as a share of it."""
    first = batch.rollouts[0]
    trained = int(first.sampled.sum())
    prompt = len(first) - trained
    count = len(batch.rollouts)
    tokens = count * trained + -(-count // group) * prompt
    planned = planned_parts(section, tokens, count * trained, len(first))
    total = sum(planned.values())
    share = None
    if found is not None and found["held_mib"] is not None:
        share = round((found["held_mib"] + found["peak_mib"]) / total, 4)
    return {"parts_mib": planned, "total_mib": round(total, 1), "measured_share": share}


def profile(context: Context, backend: PlainBackend, batch: Batch) -> list[dict[str, Any]]:
    """The operations of a step that take most of the device's time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    on_gpu = context.device == "cuda"
    with profiled(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        step(backend, batch)
        free_memory()

    def microseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    events = sorted(profiler.key_averages(), key=microseconds, reverse=True)[:ROWS]
    return [{"name": e.key[:120], "calls": e.count, "ms": round(microseconds(e) / 1000, 3)} for e in events]
