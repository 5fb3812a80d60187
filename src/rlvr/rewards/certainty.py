"""The policy's certainty of its own response, as a reward: no label is read.

From one forward pass of the policy as it is before the update (`needs`). Undecided where the response has no token of
the kind that is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar
from rlvr.records import Batch, Rollout
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec


@register("reward", "self_certainty")
@dataclass(frozen=True)
class SelfCertainty(RewardTerm):
    """The mean over the response's tokens of KL(uniform || policy) = logsumexp - mean logit - log V, at least 0.

    The reward of Intuitor (Zhao et al. 2025, arXiv 2505.19590, eq. 2). The - log V, the same for every token, is left
    out: a response's value is that KL plus a constant.
    """

    needs: ClassVar = frozenset({Need("logsumexp"), Need("mean_logit")})

    def __call__(self, batch: Batch) -> np.ndarray:
        total = batch.tokens("logsumexp/current")
        mean = batch.tokens("mean_logit/current")
        # With logits z over V tokens: KL(U || p) = -log V - (1/V) sum_v log p_v = logsumexp(z) - mean(z) - log V.
        # Columns are [T_b] for each rollout b, NaN where nothing was sampled.
        return np.asarray([_mean(a - b) for a, b in zip(total, mean, strict=True)], dtype=np.float64)


@register("reward", "entropy")
@dataclass(frozen=True)
class MeanEntropy(RewardTerm):
    """The mean entropy of the next-token distribution over the response's tokens, in nats.

    With a negative weight it pays for being sure (EM-RL, Agarwal et al. 2025, arXiv 2505.15134), with a positive one
    for exploring; as a control it says how far such a reward goes without labels.
    """

    needs: ClassVar = frozenset({Need("entropy")})

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([_mean(values) for values in batch.tokens("entropy/current")], dtype=np.float64)


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
        parts = (_mean(entropy[thinking]), _mean(entropy[rollout.sampled & ~thinking]))
        think, answer = (0.0 if np.isnan(part) else part for part in parts)
        return think, answer


def thinking_tokens(rollout: Rollout, closing: str) -> np.ndarray:
    """bool [T]: the sampled tokens up to and including the first `closing` in the text; all of them where there is
    none."""
    start = rollout.text.find(closing)
    if start < 0:
        end = len(rollout.text)
    else:
        end = start + len(closing)
    if rollout.char_ends is None:
        # Without character ends every sampled token counts as thinking.
        ends = np.full(len(rollout), -1)
    else:
        ends = rollout.char_ends
    thinking: np.ndarray = rollout.sampled & (ends <= end)
    return thinking


def _mean(values: np.ndarray) -> float:
    """The mean of the finite values; NaN where there is none."""
    finite = values[np.isfinite(values)]
    if len(finite):
        return float(finite.mean(dtype=np.float64))
    return float("nan")
