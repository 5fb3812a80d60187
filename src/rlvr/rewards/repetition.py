"""A penalty on repeated n-grams."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.components import RewardTerm
from rlvr.records import Batch, Rollout
from rlvr.registry import register


@register("reward", "repetition")
@dataclass(frozen=True)
class Repetition(RewardTerm):
    """Minus the repeated n-grams of the response: each one that stood before, as a share of all or as a count.

    The share is -(1 - distinct / all), 0 without a repetition and for a response shorter than n. The count, with a
    small weight (0.05) and behind a gate that only wrong answers pass, is the penalty of the cosine reward's authors
    (Yeo et al. 2025, arXiv 2502.03373, confirmed in a copy of their code, which sums it into the reward of the whole
    response; the paper's form with a discount on the repeated tokens is not this). Linear in the length.
    """

    # Four tokens, as the metric completion/repetition counts.
    n: int = 4
    """Length of an n-gram, at least 1."""
    of: Literal["tokens", "words"] = "tokens"
    """Token ids that the policy wrote, or words of the text between white space, in lower case."""
    count: bool = False
    """Count repetitions instead of taking their share."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}: it must be at least 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([self._penalty(self._units(r)) for r in batch.rollouts], dtype=np.float64)

    def _units(self, rollout: Rollout) -> Sequence[Hashable]:
        if self.of == "words":
            return rollout.text.lower().split()
        return rollout.token_ids[rollout.sampled].tolist()

    def _penalty(self, units: Sequence[Hashable]) -> float:
        # Overlapping n-grams: len - n + 1 of them.
        grams = list(zip(*(units[i:] for i in range(self.n)), strict=False))
        repeated = len(grams) - len(set(grams))
        if self.count:
            return -float(repeated)
        return -repeated / max(1, len(grams))
