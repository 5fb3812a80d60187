"""A penalty on each repeated token, with a discount of its own, added to the advantage of the outcome."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.advantages.group import AdvantageValues, FlatTokens, decided
from rlvr.components import Modifier
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register


@register("modifier", "repeated_tokens")
@dataclass(frozen=True)
class RepeatedTokens(Modifier):
    """Each token's advantage plus the discounted sum of the penalties from it on: -penalty at every token of an n-gram
    that stood before in the response, else 0.

    The dense repetition penalty of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (Yeo et al. 2025, arXiv
    2502.03373, section 4.5 and 4.6), as `RepetitionDensePenalty` and the advantage of several discounts in the authors'
    code (eddycmu/demystify-long-cot, openrlhf/openrlhf/reward/repetition.py and trainer/ppo_utils/experience_maker.py).
    Right and wrong responses have it. A token has the penalty once however many repeated n-grams it is in, so that the
    sum is at most penalty / (1 - discount), whatever the length. Follow it by `whiten`, as the authors normalise
    advantages.
    """

    n: int = 40
    """Length of an n-gram in tokens, at least 1."""
    penalty: Scalar = 0.05
    """The cost of a repeated token, at least 0."""
    discount: float = 0.99
    """Weight of the next token's penalty against this one's, 0 to 1; tokens long before a repetition have none of
    it."""

    per_token = True

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.discount <= 1:
            raise ValueError(f"n={self.n} must be at least 1 and discount={self.discount} from 0 to 1")

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> list[np.ndarray]:
        tokens = FlatTokens.of(batch)
        values = tokens.split(np.where(tokens.sampled, tokens.flat(advantage), 0.0))
        for rollout, own, on in zip(batch.rollouts, values, decided(batch), strict=True):
            if on:
                own[rollout.sampled] -= float(self.penalty) * self._to_come(rollout.token_ids[rollout.sampled])
        return values

    def _to_come(self, ids: np.ndarray) -> np.ndarray:
        """float64 [L]: the discounted number of repeated tokens from each token of a response on."""
        repeated = np.zeros(len(ids))
        seen: set[bytes] = set()
        for start in range(len(ids) - self.n + 1):
            gram = ids[start : start + self.n].tobytes()
            if gram in seen:
                repeated[start : start + self.n] = 1.0
            seen.add(gram)
        total = 0.0
        # G_t = x_t + discount G_(t+1), from the last token to the first.
        for t in range(len(ids) - 1, -1, -1):
            total = repeated[t] + self.discount * total
            repeated[t] = total
        return repeated
