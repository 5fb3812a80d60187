"""The description of a run in words and numbers: the batch arithmetic that `--dry-run` and the start of a run print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlvr.config import Config
from rlvr.config.stage_plan import StagePlan
from rlvr.monitor.rollout_log import estimate
from rlvr.policy.microbatch import token_limit

# A guess, used for the estimate of disk space alone: tasks are not read for a dry run.
PROMPT_TOKENS = 512
"""Tokens of a prompt that are assumed where `data.max_prompt_tokens` sets no bound."""


def plan_lines(config: Config, plans: Sequence[StagePlan], folder: Path, longest: Sequence[int] = ()) -> list[str]:
    """The run folder, and for each stage how prompts become completions, micro-batches and optimizer steps.

    `longest` has for each stage the tokens that the context leaves for a response; empty where that is not known.
    """
    limits = longest or [plan.config.rollout.max_new_tokens for plan in plans]
    lines = [f"run folder: {folder}"]
    for number, (plan, limit) in enumerate(zip(plans, limits, strict=True), 1):
        if plan.steps is None:
            passes = f"run.epochs={config.run.epochs:g} passes over the tasks"
            lines += _stage_lines(number, plan, limit, f"the steps of {passes}, counted when they are read")
        else:
            lines += _stage_lines(number, plan, limit, f"{plan.allowed} steps")
    return [*lines, *_disk_lines(config, plans)]


def recorded_bytes(config: Config, plans: Sequence[StagePlan]) -> tuple[int, int]:
    """About how many bytes of rollouts a run writes at most: in a step, and in all, of which `logging.rollouts_gb` are
    kept."""
    largest = 0
    total = 0.0
    for plan in plans:
        rollout = plan.config.rollout
        group = rollout.group_size if plan.kind != "sft" else 1
        prompt = plan.config.data.max_prompt_tokens or PROMPT_TOKENS
        of_step = estimate(rollout.prompts_per_step * group, prompt + rollout.max_new_tokens)
        largest = max(largest, of_step)
        # `logging.rollouts` is the number of steps between files, 0 for none: that case returns 0 below.
        # A number of steps that is not known yet, by run.epochs, may fill all that is kept.
        written = plan.allowed / max(1, config.logging.rollouts) if plan.steps is not None else math.inf
        total += of_step * written
    if config.logging.rollouts == 0:
        return 0, 0
    # The newest file stays even where it alone is over the limit.
    return largest, int(min(total, max(config.logging.rollouts_bytes, largest)))


def size_text(size: float) -> str:
    """A number of bytes in words, such as 3.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            if unit == "bytes" or size >= 100:
                return f"{size:.0f} {unit}"
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _disk_lines(config: Config, plans: Sequence[StagePlan]) -> list[str]:
    of_step, kept = recorded_bytes(config, plans)
    if not of_step:
        return []
    return [
        f"rollouts on disk: at most about {size_text(of_step)} a step, {size_text(kept)} kept (logging.rollouts_gb)"
    ]


def _stage_lines(number: int, plan: StagePlan, limit: int, steps: str) -> list[str]:
    rollout = plan.config.rollout
    optim = plan.config.optim
    sampled = plan.kind != "sft"
    group = rollout.group_size if sampled else 1
    rows = rollout.prompts_per_step * group
    # A batch is cut by whole groups, so there are never more optimizer steps than groups.
    updates = min(optim.updates_per_batch, rollout.prompts_per_step)
    per_update = math.ceil(rows / updates)
    if token_limit(optim) is not None:
        micro = f"micro-batches of at most {token_limit(optim)} tokens"
    else:
        size = min(optim.micro_batch_size or per_update, per_update)
        micro = f"{math.ceil(per_update / size)} micro-batches of {size}"
    made = f"{rows} demonstrations"
    if sampled:
        # `limit` is what the context leaves after the stage's shortest prompt, and so a bound for all responses.
        new = min(limit, rollout.max_new_tokens)
        made = f"{rollout.prompts_per_step} prompts x {group} = {rows} completions, at most {new} new tokens each "
        made += f"({rows * new} in all)"
        if new < rollout.max_new_tokens:
            made += f": the context leaves no more of rollout.max_new_tokens={rollout.max_new_tokens} after the "
            made += "shortest prompt"
    update = f"  update: {updates} x {optim.epochs_per_batch} optimizer steps of {per_update} completions in {micro}"
    if plan.steps is not None:
        update += f"; {plan.allowed * updates * optim.epochs_per_batch} optimizer steps in all"
    return [f"stage {number} ({plan.name}): {steps}, each of {made}", update]
