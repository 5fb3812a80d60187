"""The simplest terms: the length, and controls that do not depend on the answer."""

from __future__ import annotations

import numpy as np

from rlvr.core.seeding import seed_of
from rlvr.records import Batch
from rlvr.registry import register


@register("reward", "length")
def length(batch: Batch, *, per: int = 100) -> np.ndarray:
    """Tokens of the completion divided by `per`; give it a negative weight to shorten responses."""
    return np.asarray([r.completion_length / per for r in batch.rollouts], dtype=np.float64)


@register("reward", "constant")
def constant(batch: Batch, *, value: float = 1.0) -> np.ndarray:
    """The same number for every rollout: an offset, or a control without a signal under a baseline of the group."""
    return np.full(len(batch), value)


@register("reward", "random")
def random(batch: Batch, *, share: float = 0.5, seed: int = 0) -> np.ndarray:
    """1 with probability `share`, else 0, whatever the answer: a control (Shao et al. 2025, "Spurious Rewards",
    arXiv 2506.10947). Drawn from the seed and the rollout's draw and member, so it does not depend on the batch."""
    # One generator for each rollout, seeded by (seed, group, member): the same value on every rank and after a resume.
    drawn = [np.random.default_rng(seed_of("random reward", seed, r.group, r.member)).random() for r in batch.rollouts]
    return (np.asarray(drawn, dtype=np.float64) < share).astype(np.float64)
