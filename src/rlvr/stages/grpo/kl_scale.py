"""Factors of the KL coefficient for each token: by the task's source, the policy's turn, or thinking and answer."""

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
    """ConfigError where a factor is of a source or a turn that the run does not have."""
    kl = config.algorithm.kl
    if kl is None or kl.scale is None:
        return
    where = f"algorithm.kl.scale: `by: {kl.scale.by}`"
    if kl.scale.by == "source":
        sources = sorted({task.source for task in tasks if task.source is not None})
        for name in kl.scale.factors:
            if name not in sources:
                raise ConfigError(f"{where} names {name!r}, and no task is of that source{nearest(name, sources)}")
    if kl.scale.by == "turn":
        plan: RolloutPlan = registry.build("plan", config.rollout.plan)
        most = plan.turns
        for name in kl.scale.factors:
            if most is not None and int(name) > most:
                raise ConfigError(
                    f"{where} names turn {name}, and rollout.plan has {most} at most: leave it out, or set the "
                    "plan's `turns`"
                )


def kl_factors(batch: Batch, scale: KLScaleConfig, tokenizer: Any) -> list[np.ndarray]:
    """float32 [T_b] each: what the coefficient is multiplied by; 1 at tokens that the policy did not write."""
    return [np.where(r.sampled, _of_rollout(r, scale, tokenizer), 1.0).astype(np.float32) for r in batch.rollouts]


def _of_rollout(rollout: Rollout, scale: KLScaleConfig, tokenizer: Any) -> np.ndarray:
    factors = scale.factors
    other = scale.other
    if scale.by == "source":
        return np.full(len(rollout), factors.get(str(rollout.task.source), other))
    if scale.by == "part":
        if rollout.char_ends is None:
            rollout.char_ends = char_ends(tokenizer, rollout)
        thinking = thinking_tokens(rollout, scale.closing)
        return np.where(thinking, factors.get("think", other), factors.get("answer", other))
    # A rollout of one turn has no segments: all of it is turn 1.
    values = np.full(len(rollout), factors.get("1", other))
    turns = [segment for segment in rollout.segments if segment.kind == "turn"]
    for number, turn in enumerate(turns, start=1):
        # [T]; segments are [start, end) in tokens.
        values[turn.start : turn.end] = factors.get(str(number), other)
    return values
