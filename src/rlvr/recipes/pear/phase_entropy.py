"""PEAR: a high entropy of the thinking is penalised, one of the answer is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar
from rlvr.records import Batch, Rollout
from rlvr.registry import register
from rlvr.rewards.certainty import mean_of_finite, thinking_tokens
from rlvr.rewards.terms import TermSpec


@register("reward", "phase_entropy")
@dataclass(frozen=True)
class PhaseEntropy(RewardTerm):
    """Minus the entropy of the thinking, less a share of that of the answer, for right answers.

    PEAR (Huang et al. 2025, arXiv 2510.08026) penalises a high entropy of the thinking and allows one in the answer;
    the penalty clip(H_think - alpha H_answer, 0, 1) is a guess at its form. The phases meet after the first
    `end_of_thinking`; without it all is thinking and H_answer is 0. Add it to the verdict; wrong answers have 0.
    """

    end_of_thinking: str = "</think>"
    """The text that ends the thinking."""
    alpha: Scalar = 1.0
    """The share of the answer's entropy that is subtracted."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)
    needs: ClassVar = frozenset({Need("entropy")})
    reads_characters: ClassVar = True

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        penalty = [
            # H_think - alpha H_answer in nats, cut to [0, 1] so that the penalty of a right answer never exceeds its
            # reward of 1.
            np.clip(think - float(self.alpha) * answer, 0.0, 1.0)
            for think, answer in map(self._phases, batch.rollouts, batch.tokens("entropy/current"))
        ]
        values = np.where(of >= 1.0, -np.asarray(penalty, dtype=np.float64), 0.0)
        # NaN >= 1 is False: an undecided rollout would count as wrong without this.
        return np.where(np.isnan(of), np.nan, values)

    def _phases(self, rollout: Rollout, entropy: np.ndarray) -> tuple[float, float]:
        """The mean entropy of the thinking and of the answer, 0 for a phase without tokens."""
        thinking = thinking_tokens(rollout, self.end_of_thinking)
        parts = (mean_of_finite(entropy[thinking]), mean_of_finite(entropy[rollout.sampled & ~thinking]))
        think, answer = (0.0 if np.isnan(part) else part for part in parts)
        return think, answer
