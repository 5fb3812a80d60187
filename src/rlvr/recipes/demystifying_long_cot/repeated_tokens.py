"""A penalty on each repeated token, for credit with a discount of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.core.span_rewards import SpanRewards
from rlvr.records import Batch, Rollout, SpanScores
from rlvr.registry import register


@register("reward", "repeated_tokens")
@dataclass(frozen=True)
class RepeatedTokens(RewardTerm):
    """-penalty at every token of an n-gram that stood before in the response: a span of one token each.

    The dense repetition penalty of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (Yeo et al. 2025, arXiv
    2502.03373, section 4.5 and 4.6), as `RepetitionDensePenalty` in the authors' code (eddycmu/demystify-long-cot,
    commit e90cf9b, openrlhf/openrlhf/reward/repetition.py); the advantage `spans` with `per: token` and
    `normalise: none` is theirs of several discounts (trainer/ppo_utils/experience_maker.py). Right and wrong responses
    have it. A token has the penalty once however many repeated n-grams it is in, so that the discounted sum is at most
    penalty / (1 - discount), whatever the length. Follow it by `whiten`, as the authors normalise advantages.
    """

    n: int = 40
    """Length of an n-gram in tokens, at least 1."""
    penalty: Scalar = 0.05
    """The cost of a repeated token, at least 0."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}: it must be at least 1")

    def __call__(self, batch: Batch) -> SpanRewards:
        return SpanRewards([self._scores(rollout) for rollout in batch.rollouts])

    def _scores(self, rollout: Rollout) -> SpanScores:
        written = np.flatnonzero(rollout.sampled)
        places = written[self._repeated(rollout.token_ids[written])]
        return SpanScores(places, places + 1, np.full(len(places), -float(self.penalty)))

    def _repeated(self, ids: np.ndarray) -> np.ndarray:
        """bool [L]: the tokens of a response that are in a repeated n-gram."""
        repeated = np.zeros(len(ids), dtype=bool)
        seen: set[bytes] = set()
        for start in range(len(ids) - self.n + 1):
            gram = ids[start : start + self.n].tobytes()
            if gram in seen:
                repeated[start : start + self.n] = True
            seen.add(gram)
        return repeated
