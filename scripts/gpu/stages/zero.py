"""Stage 5: DeepSpeed ZeRO 1 to 3 with one rank (over NCCL on a GPU, gloo on a CPU) against the plain backend: the same
steps on the same rollouts, and a short run that samples, publishes and updates under ZeRO-3."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import torch

from rlvr import registry
from rlvr.config import ModelConfig
from rlvr.config.config_loading import load_config
from rlvr.distributed import World
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, Objective, ObjectiveTerm
from rlvr.policy import load_policy
from stages.context import Context, SkipError
from stages.models import made_up, model_section
from stages.runs import run_and_summarize

STEPS = 3
COMPARED = ("grad_norm", "entropy/trained", "mismatch/mean")
"""Of each step. The last two show the weights that the steps before it made; the loss of a first step is the same for
all weights."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative. bfloat16 has 8 bits: the plain backend computes by autocast, DeepSpeed with bfloat16 weights."""


def run(context: Context) -> None:
    """The plain backend first, then the stages of ZeRO, in both types; then the run."""
    if importlib.util.find_spec("deepspeed") is None:
        raise SkipError("DeepSpeed is not installed here: its piece of pack.sh brings it")
    for dtype in ("float32", "bfloat16"):
        expected = context.measure(f"plain {dtype}", steps, context, dtype, {"name": "plain"}, expected=5.0)
        for stage in (1, 2, 3):
            backend = {"name": "deepspeed", "zero_stage": stage}
            context.measure(f"ZeRO-{stage} {dtype}", compared, context, dtype, backend, expected, expected=5.0)
    context.measure("a run under ZeRO-3", zero_run, context, expected=10.0)


def steps(context: Context, dtype: str, backend: dict[str, Any]) -> dict[str, Any]:
    """What the metrics of three updates say, and the GPU memory that is held after them."""
    options = registry.build("backend", backend)
    section = model_section(context, "0.5B", dtype=dtype)
    if not context.toy:
        section["scratch"]["layers"] = 6  # weights are made on the CPU, alike for all backends
    policy = load_policy(ModelConfig(**section), shared_out=options.partitions)
    opened = options.open(policy, "adamw", World())
    learner = Learner(opened)
    loss = ObjectiveTerm("policy", ClippedPolicyLoss(0.2, 0.2, "tokens"), "policy")
    config = load_config({"optim": {"micro_batch_size": 4}}).optim
    batch = made_up(policy, rollouts=8, prompt=8, response=24 if context.toy else 120, group=4)
    batch.columns["advantage"] = np.random.default_rng(0).normal(size=8)
    rows = [learner.update(batch, Objective((loss,), 1.0), config, 1e-3) for _ in range(STEPS)]
    held = round(torch.cuda.memory_allocated() / 2**20, 1) if context.device == "cuda" else None
    return {"steps": [{key: row[key] for key in COMPARED} for row in rows], "held_mib": held}


def compared(context: Context, dtype: str, backend: dict[str, Any], expected: dict[str, Any] | None) -> dict[str, Any]:
    """The same, with the largest relative difference from the plain backend. AssertionError where it is too large."""
    found = steps(context, dtype, backend)
    if expected is None:
        return found
    differences = [
        abs(mine[key] - theirs[key]) / max(abs(theirs[key]), 1e-6)
        for mine, theirs in zip(found["steps"], expected["steps"], strict=True)
        for key in COMPARED
    ]
    largest = max(differences)
    if not math.isfinite(largest) or largest > TOLERANCE[dtype]:
        raise AssertionError(f"differs from the plain backend by {largest:.3g}: {found} against {expected}")
    return {**found, "largest_difference": float(f"{largest:.2e}")}


def zero_run(context: Context) -> dict[str, Any]:
    """Two steps of a run whose weights are shared out, sampled with the hf engine."""
    return run_and_summarize(
        context,
        "0.5B",
        {"engine": "hf", "max_new_tokens": 8 if context.toy else 64},
        steps=2,
        distributed={"backend": "deepspeed", "zero_stage": 3},
    )
