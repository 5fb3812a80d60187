"""Which rollouts train: functions from a batch to the positions that stay, applied in order before advantages."""

from __future__ import annotations

import numpy as np

from rlvr.records import Batch
from rlvr.registry import register


@register("selector", "mixed_groups")
def mixed_groups(batch: Batch) -> np.ndarray:
    """Keep the groups whose decided rewards differ: the others give no advantage under a group baseline.

    Unlike skipping them in the backward pass, which changes nothing but time, this takes them out of the loss's
    denominator (DAPO, Yu et al. 2025, section 3.2, without its refill).
    """
    rewards = batch.column("reward")
    keep = np.zeros(len(batch), dtype=bool)
    for group in batch.groups():
        decided = rewards[group.index][np.isfinite(rewards[group.index])]
        keep[group.index] = len(decided) > 0 and decided.min() < decided.max()
    return np.flatnonzero(keep)


@register("selector", "decided")
def decided(batch: Batch) -> np.ndarray:
    """Keep the rollouts whose reward is decided."""
    return np.flatnonzero(np.isfinite(batch.column("reward")))
