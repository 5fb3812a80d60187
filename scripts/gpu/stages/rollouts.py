"""Stage 6: vLLM beside the trainer on one GPU: whole runs, a publish by CUDA IPC of a vocabulary of 152k, the
difference of log-probs after it, memory asleep and awake, tokens per second; and the hf engine with the same
requests, and the kernels of its decoding steps."""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from rlvr import GRPOTrainer
from rlvr.rollout import Request, Sampling, probe
from stages.context import Context, SkipError
from stages.measuring import free_gib
from stages.runs import summary, trainer_of

EAGER = {"name": "vllm", "gpu_memory_utilization": 0.4, "engine_args": {"enforce_eager": True}}
"""First without compilation and CUDA graphs: less can go wrong, and it starts sooner."""
GRAPHS = {"name": "vllm", "gpu_memory_utilization": 0.4}
ON_CPU = {"name": "vllm", "threads": 1, "kv_cache_gib": 0.25, "max_num_seqs": 64}
PUBLISHES = 3
FEW, MORE = 8, 40
"""Tokens of the two runs whose difference is decoding steps alone."""


@dataclass(frozen=True)
class Case:
    """A run with an engine."""

    name: str
    engine: dict[str, Any]
    adapter: bool = False
    staleness: int = 0
    steps: int = 3
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_vllm(self) -> bool:
        """Whether it is a run of vLLM."""
        return self.engine["name"] == "vllm"


CASES = (
    Case("vllm", EAGER),
    Case("hf", {"name": "hf"}),
    Case("vllm LoRA", EAGER, adapter=True),
    Case("vllm staleness 1", EAGER, staleness=1),
    Case("vllm with CUDA graphs", GRAPHS),
    Case("vllm offload", EAGER, sections={"distributed": {"offload_during_rollout": True}}),
)
TOY_CASES = (
    Case("vllm", ON_CPU),
    Case("hf", {"name": "hf"}),
    Case("vllm LoRA staleness 1", ON_CPU, adapter=True, staleness=1),
)
"""Two starts of vLLM, which take most of the time on a CPU."""


def run(context: Context) -> None:
    """Every case in its turn; those of vLLM are left out where it is missing."""
    for case in TOY_CASES if context.toy else CASES:
        context.measure(case.name, measured, context, case, expected=5.0 if context.toy else 60.0)


def measured(context: Context, case: Case) -> dict[str, Any]:
    """The run, and then its engine by itself."""
    if case.needs_vllm and importlib.util.find_spec("vllm") is None:
        raise SkipError("vLLM is not installed here: its pieces of pack.sh bring it")
    before = free_gib() if context.device == "cuda" else None
    rollout = {
        "engine": case.engine,
        "staleness": case.staleness,
        "max_new_tokens": 8 if context.toy else 256,
        "ignore_eos": True,  # equal work for all engines
    }
    adapter = {"r": 4 if context.toy else 16} if case.adapter else None
    start = time.perf_counter()
    with trainer_of(context, "0.5B", rollout, case.steps, adapter=adapter, **case.sections) as trainer:
        found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - start, 2), "free_gib_before": before}
        rows = trainer.train()
        found |= {
            "step_seconds": round(rows[-1]["time/step"], 3),
            "mismatch_mean": max(
                (row["mismatch/mean"] for row in rows if row["mismatch/mean"] is not None), default=None
            ),
            "steps": summary(rows),
        }
        if case.staleness == 0:  # else requests of the next step are under way
            found |= publishes(context, trainer)
            found |= speed(context, trainer)
        if not case.needs_vllm:
            found |= decoding_step(context, trainer)
    return found


def publishes(context: Context, trainer: GRPOTrainer) -> dict[str, Any]:
    """Seconds, bytes and gap of log-probs of a publish, and the GPU's free memory while the engine sleeps and when it
    is awake."""
    engine, backend, times = trainer.rollouts.engine, trainer.training.backend, []
    found: dict[str, Any] = {}
    for _ in range(PUBLISHES):
        engine.release()
        backend.release()
        if context.device == "cuda":
            found["free_gib_asleep"] = free_gib()
        start = time.perf_counter()
        published = engine.publish(engine.version + 1, backend.named_weights)
        times.append(time.perf_counter() - start)
        found["publish_bytes"] = None if published is None else published.bytes
    if context.device == "cuda":
        found["free_gib_awake"] = free_gib()
    found["publish_seconds"] = round(statistics.median(times), 4)
    found["probe_gap"] = probe(engine, trainer.policy, trainer.rollouts.collector)
    return found


def speed(context: Context, trainer: GRPOTrainer) -> dict[str, float]:
    """Tokens per second of many requests handed in at once."""
    count, new = (16, 16) if context.toy else (256, 512)
    start = time.perf_counter()
    tokens = sampled(trainer, count, new)
    return {"requests": count, "sampled_tokens_per_second": round(tokens / (time.perf_counter() - start), 1)}


def sampled(trainer: GRPOTrainer, count: int, new: int) -> int:
    """Tokens that the engine sampled for `count` requests of `new` tokens each, handed in at once."""
    sampling = Sampling(new, ignore_eos=True)
    prompt = tuple(range(10, 26))
    requests = [Request((*prompt, 26 + number // 8), sampling, number) for number in range(count)]

    async def all_of_them() -> int:
        completions = await asyncio.gather(*(trainer.rollouts.engine.generate(request) for request in requests))
        return sum(len(completion.token_ids) for completion in completions)

    return int(trainer.rollouts.collector.submit(all_of_them()).result())


def decoding_step(context: Context, trainer: GRPOTrainer) -> dict[str, float]:
    """Kernels and copies of a decoding step by torch's profiler (on a CPU: calls of ATen), which
    scripts/benchmarks/decode_launches.py counts by dispatch."""
    few, more = (profiled(trainer, new, context.device == "cuda") for new in (FEW, MORE))
    return {f"step_{kind}": round((more[kind] - few[kind]) / (MORE - FEW), 1) for kind in more}


def profiled(trainer: GRPOTrainer, new: int, on_gpu: bool) -> dict[str, int]:
    """The profiler's events of `new` decoding steps and their prompts, by kind."""
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    # The engine decodes in a thread of its own.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[activity], experimental_config=everywhere) as profile:
        sampled(trainer, 16, new)
    events = list(profile.events())
    if not on_gpu:
        return {"operations": sum(event.name.startswith("aten::") for event in events)}
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(event.name.startswith(("Memcpy", "Memset")) for event in events)
    return {"kernels": len(events) - copies, "copies": copies}
