"""What a run will do, in words and numbers: the batch arithmetic that `--dry-run` and the start of a run print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlvr.config import Config
from rlvr.stage_plan import StagePlan


def plan_lines(config: Config, plans: Sequence[StagePlan], folder: Path) -> list[str]:
    """The run folder, and for each stage how prompts become completions, micro-batches and optimizer steps."""
    return [
        f"run folder: {folder}",
        *(line for number, plan in enumerate(plans, 1) for line in _stage_lines(number, plan)),
    ]


def _stage_lines(number: int, plan: StagePlan) -> list[str]:
    rollout, optim, steps = plan.config.rollout, plan.config.optim, plan.allowed
    sampled = plan.kind != "sft"
    group = rollout.group_size if sampled else 1
    rows = rollout.prompts_per_step * group
    updates = min(optim.updates_per_batch, rollout.prompts_per_step)
    per_update = math.ceil(rows / updates)
    if optim.micro_batch_tokens is not None:
        micro = f"micro-batches of at most {optim.micro_batch_tokens} tokens"
    else:
        size = min(optim.micro_batch_size or per_update, per_update)
        micro = f"{math.ceil(per_update / size)} micro-batches of {size}"
    made = f"{rollout.prompts_per_step} prompts x {group} = {rows} completions" if sampled else f"{rows} demonstrations"
    tokens = f", at most {rows * rollout.max_new_tokens} new tokens" if sampled else ""
    total = steps * updates * optim.epochs_per_batch
    return [
        f"stage {number} ({plan.name}): {steps} steps, each of {made}{tokens}",
        f"  update: {updates} x {optim.epochs_per_batch} optimizer steps of {per_update} completions in {micro}; {total} optimizer steps in all",
    ]
