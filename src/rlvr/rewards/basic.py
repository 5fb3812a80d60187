"""Terms that need no other: the verdict and its named scores, the length, and controls that say nothing of the answer."""

from __future__ import annotations

import numpy as np

from rlvr.core.seeding import seed_of
from rlvr.errors import ConfigError, nearest
from rlvr.records import Batch, Verdict
from rlvr.registry import register


@register("reward", "verdict")
def verdict(
    batch: Batch, *, part: str | None = None, verifier: str | None = None, missing: float | None = None
) -> np.ndarray:
    """The score of each rollout's verdict; NaN where undecided or missing.

    `part` takes a named score of the verdict instead (`combine` has one for each of its verifiers, `instructions` one for
    each instruction); `missing` is what a decided verdict without that score counts as (null: undecided). `verifier` names
    whose verdict, where a rollout has several (`turn 1` of the plan `turns` with `judge: each`, say; a rollout without it counts
    as `missing`); null: the task's own.
    """
    found = [r.verdict if verifier is None else r.verdicts.get(verifier) for r in batch.rollouts]
    if part is None:
        absent = np.nan if verifier is None or missing is None else missing
        scores = [absent if v is None else np.nan if v.score is None else v.score for v in found]
        return np.asarray(scores, dtype=np.float64)
    decided = [v for v in found if v is not None and v.decided]
    if missing is None and decided and not any(part in v.scores for v in decided):
        known = sorted({name for v in decided for name in v.scores})
        raise ConfigError(
            f"rewards: no verdict has a score named {part!r}{nearest(part, known)}; set `missing` where a verdict may be "
            "without it"
        )
    return np.asarray([_part(v, part, np.nan if missing is None else missing) for v in found], dtype=np.float64)


def _part(verdict: Verdict | None, part: str, missing: float) -> float:
    return np.nan if verdict is None or not verdict.decided else verdict.scores.get(part, missing)


def lengths(batch: Batch) -> np.ndarray:
    """float64 [B]: tokens of each rollout that the policy wrote."""
    return np.asarray([int(r.sampled.sum()) for r in batch.rollouts], dtype=np.float64)


@register("reward", "length")
def length(batch: Batch, *, per: int = 100) -> np.ndarray:
    """Tokens of the completion divided by `per`; give it a negative weight to shorten responses."""
    return np.asarray([r.completion_length / per for r in batch.rollouts], dtype=np.float64)


@register("reward", "constant")
def constant(batch: Batch, *, value: float = 1.0) -> np.ndarray:
    """The same number for every rollout: an offset, or a control that teaches nothing under a baseline of the group."""
    return np.full(len(batch), value)


@register("reward", "random")
def random(batch: Batch, *, share: float = 0.5, seed: int = 0) -> np.ndarray:
    """1 with probability `share`, else 0, whatever the answer: a control (Shao et al. 2025, "Spurious Rewards",
    arXiv 2506.10947). Drawn from the seed and the rollout's draw and member, so it does not depend on the batch."""
    drawn = [np.random.default_rng(seed_of("random reward", seed, r.group, r.member)).random() for r in batch.rollouts]
    return (np.asarray(drawn, dtype=np.float64) < share).astype(np.float64)
