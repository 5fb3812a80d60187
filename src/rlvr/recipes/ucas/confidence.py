"""UCAS: advantages weighted by how confident the policy is of the response and of each token.

The statistics are those of the policy before the update, and cost a forward pass. Tokens without a known log-prob keep
their advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.advantages.group import AdvantageValues, FlatTokens, decided, group_advantage
from rlvr.components import Modifier
from rlvr.core.needs import CURRENT, Need
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register


@register("modifier", "confidence")
@dataclass(frozen=True)
class Confidence(Modifier):
    """Unsure right answers and sure wrong ones count more, and tokens of a high logit pay.

    A response's confidence is the sum over its tokens of KL(uniform || p) = -log V - mean log p over the vocabulary V;
    with z its standard score in the group, a positive advantage is times exp(-right z), any other times exp(wrong z).
    Then penalty x the token's logit, brought to [0, 1] over the whole batch, is subtracted; a positive advantage does
    not fall below 0 by it. UCAS (Xie et al. 2025, arXiv 2510.10649), as `compute_ucas_advantage` of the authors' code
    (xvolcano02/UCAS, verl/trainer/ppo/core_algos.py); of their sum over tokens a longer response has more.
    """

    right: Scalar = 0.25
    """Strength of the confidence's weight on positive advantages, at least 0 (their beta_positive)."""
    wrong: Scalar = 0.35
    """The same on the others (their beta_negative)."""
    penalty: Scalar = 0.05
    """The amount subtracted at the highest logit of the batch, at least 0; 0: nothing."""
    epsilon: float = 1e-6
    """Added to the standard deviation of the confidences, and to the range of the logits."""

    needs = frozenset({Need("logprobs"), Need("logsumexp"), Need("mean_logit")})
    per_token = True

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> list[np.ndarray]:
        tokens = FlatTokens.of(batch)
        logprobs, partition, mean_logit = (
            tokens.flat(batch.tokens(f"{name}/{CURRENT}")) for name in ("logprobs", "logsumexp", "mean_logit")
        )
        # bool [N]
        live = tokens.sampled & decided(batch)[tokens.rollout] & np.isfinite(logprobs)
        # [B]: mean log p over the vocabulary is mean_logit - logsumexp, so KL(uniform || p) = logsumexp - mean_logit -
        # log V. The authors leave the constant -log V out of the sum, and so does this.
        sure = tokens.sums(np.where(live, partition - mean_logit, 0.0))
        # [B]: standard scores within the group, with n - 1; 0 where undecided.
        known = np.where(decided(batch), sure, np.nan)
        scores = group_advantage(known, batch.group_index(), "mean", "std", self.epsilon, unbiased=True)
        values = np.where(tokens.sampled, tokens.flat(advantage), 0.0)
        # exp(-right z) for A > 0 and exp(wrong z) for A <= 0: no sign changes.
        strength = np.where(values > 0, -float(self.right), float(self.wrong))
        shaped = values * np.exp(strength * scores[tokens.rollout])
        # [N]: the logit of the token itself, log p + logsumexp.
        logit = _scaled(np.where(live, logprobs + partition, 0.0), live, self.epsilon)
        penalised = shaped - float(self.penalty) * logit
        return tokens.split(np.where(shaped > 0, np.maximum(penalised, 0.0), penalised))


def _scaled(values: np.ndarray, live: np.ndarray, epsilon: float) -> np.ndarray:
    """Values of live tokens brought to [0, 1] over the batch, 0.5 where all are the same; other tokens 0."""
    if not live.any():
        return np.zeros(len(values))
    low = values[live].min()
    high = values[live].max()
    if np.isclose(high, low):
        # As the authors do: no token is surer than another, and all pay the same.
        scaled = np.full(len(values), 0.5)
    else:
        scaled = (values - low) / (high - low + epsilon)
    return np.where(live, scaled, 0.0)
