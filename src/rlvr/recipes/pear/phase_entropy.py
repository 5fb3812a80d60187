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

    PEAR (Huang et al. 2025, arXiv 2510.08026) penalises a high entropy of the thinking and allows one in the answer:
    max(0, H_think - alpha H_answer), H being the mean entropy of a phase under the policy that sampled, in nats. The
    tokens of `end_of_thinking` are in neither phase; without it all is thinking and H_answer is 0. Add it to the
    verdict, so that a right answer is worth 1 less the penalty; wrong answers have 0.

    Neither the paper nor its code (iNLP-Lab/PEAR, entropy.py) could be opened: the formula is that of a note on the
    paper (zhaoyang97/Paper-Notes-en, commit e08dcc0, docs/ICLR2026/llm_reasoning,
    pear_phase_entropy_aware_reward_for_efficient_reasoning.md). The reviews of the paper name the maximum of its
    equation 7, and the case without `end_of_thinking`.
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
            max(0.0, think - float(self.alpha) * answer)
            for think, answer in map(self._phases, batch.rollouts, batch.tokens("entropy/current"))
        ]
        values = np.where(of >= 1.0, -np.asarray(penalty, dtype=np.float64), 0.0)
        # NaN >= 1 is False: an undecided rollout would count as wrong without this.
        return np.where(np.isnan(of), np.nan, values)

    def _phases(self, rollout: Rollout, entropy: np.ndarray) -> tuple[float, float]:
        """The mean entropy of the thinking and of the answer, 0 for a phase without tokens."""
        thinking = thinking_tokens(rollout, self.end_of_thinking)
        answer = rollout.sampled & ~thinking
        place = rollout.text.find(self.end_of_thinking)
        if place >= 0 and rollout.char_ends is not None:
            thinking &= rollout.char_ends <= place
        means = (mean_of_finite(entropy[thinking]), mean_of_finite(entropy[answer]))
        of_thinking, of_answer = (0.0 if np.isnan(mean) else mean for mean in means)
        return of_thinking, of_answer
