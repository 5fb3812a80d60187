"""Factors of the KL coefficient for each token, chosen by the task's source, by the turn of the policy, or by the part
of the response (thinking or answer)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.config import Config, KLScaleConfig
from rlvr.errors import ConfigError, nearest
from rlvr.records import Batch, Rollout, Task
from rlvr.rewards.certainty import thinking_tokens
from rlvr.rollout.characters import char_ends
from rlvr.rollout.plans import RolloutPlan


def check_scale(config: Config, tasks: Sequence[Task]) -> None:
    """ConfigError where a factor names a source that no task has, or a turn beyond the plan's limit."""
    kl = config.algorithm.kl
    if kl is None or kl.scale is None:
        return
    where = f"algorithm.kl.scale: `by: {kl.scale.by}`"
    plan: RolloutPlan = registry.build("plan", config.rollout.plan)
    if kl.scale.by == "source":
        sources = sorted({*plan.sources, *(task.source for task in tasks if task.source is not None)})
        for name in kl.scale.factors:
            if name not in sources:
                raise ConfigError(f"{where} names {name!r}, and no task is of that source{nearest(name, sources)}")
    if kl.scale.by == "turn":
        turn_limit = plan.turns
        for name in kl.scale.factors:
            if turn_limit is not None and int(name) > turn_limit:
                raise ConfigError(
                    f"{where} names turn {name}, and rollout.plan has {turn_limit} at most: leave it out, or set "
                    "the plan's `turns`"
                )


def kl_factors(batch: Batch, scale: KLScaleConfig, tokenizer: Any) -> list[np.ndarray]:
    """For each rollout float32 [T_b]: the factor of the KL coefficient at each token; 1 at tokens that the policy did
    not sample."""
    return [np.where(r.sampled, _rollout_factors(r, scale, tokenizer), 1.0).astype(np.float32) for r in batch.rollouts]


def _rollout_factors(rollout: Rollout, scale: KLScaleConfig, tokenizer: Any) -> np.ndarray:
    factors = scale.factors
    other = scale.other
    if scale.by == "source":
        return np.full(len(rollout), factors.get(str(rollout.task.source), other))
    if scale.by == "part":
        # `thinking_tokens` reads the character ends of the rollout.
        if rollout.char_ends is None:
            rollout.char_ends = char_ends(tokenizer, rollout)
        thinking = thinking_tokens(rollout, scale.closing)
        return np.where(thinking, factors.get("think", other), factors.get("answer", other))
    # Turn 1 everywhere, since a rollout of a single-turn plan has no segments.
    values = np.full(len(rollout), factors.get("1", other))
    for number, turn in enumerate(rollout.turns, start=1):
        # [T]; segments are [start, end) in tokens.
        values[turn.start : turn.end] = factors.get(str(number), other)
    return values
