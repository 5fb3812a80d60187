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
    """Unsure right answers and sure wrong ones count more, and sure tokens pay.

    A response's confidence is the mean over its tokens of KL(uniform || p) = -log V - mean log p over the vocabulary V;
    with z its standard score in the group, a positive advantage is times exp(-scale z), a negative one times exp(scale
    z). Then penalty x the token's logit, brought to [0, 1] within its response, is subtracted. UCAS (Xie et al. 2025,
    arXiv 2510.10649): the form, 0.25 and 0.01 as in a copy of the authors' code; that its log-probs are means over the
    vocabulary and the interval [0, 1] are read into it.
    """

    scale: Scalar = 0.25
    """Strength of the confidence's weight, at least 0; 0: confidence has no effect."""
    penalty: Scalar = 0.01
    """The amount subtracted at the surest token of a response, at least 0; 0: nothing."""
    epsilon: float = 1e-6
    """Added to the standard deviation of the confidences."""

    needs = frozenset({Need("logprobs"), Need("logsumexp"), Need("mean_logit")})
    per_token = True

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> list[np.ndarray]:
        tokens = FlatTokens.of(batch)
        logprobs, partition, mean_logit = (
            tokens.flat(batch.tokens(f"{name}/{CURRENT}")) for name in ("logprobs", "logsumexp", "mean_logit")
        )
        # bool [N]
        live = tokens.sampled & decided(batch)[tokens.rollout] & np.isfinite(logprobs)
        count = np.maximum(tokens.sums(live.astype(np.float64)), 1.0)
        # the standard score needs no -log V
        # [B]: mean log p over the vocabulary is mean_logit - logsumexp, so KL(uniform || p) = logsumexp - mean_logit -
        # log V.
        sure = tokens.sums(np.where(live, partition - mean_logit, 0.0)) / count
        # [B]: standard scores within the group, with n - 1; 0 where undecided.
        known = np.where(decided(batch), sure, np.nan)
        scores = group_advantage(known, batch.group_index(), "mean", "std", self.epsilon, unbiased=True)
        weight = float(self.scale) * scores
        values = np.where(tokens.sampled, tokens.flat(advantage), 0.0)
        # exp(-scale z) for A > 0 and exp(scale z) for A < 0: no sign changes.
        values = values * np.exp(-np.sign(values) * weight[tokens.rollout])
        # [N]: the logit of the token itself, log p + logsumexp.
        logit = np.where(live, logprobs + partition, 0.0)
        return tokens.split(values - float(self.penalty) * _within(tokens, logit, live))


def _within(tokens: FlatTokens, values: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Values of live tokens brought to [0, 1] within their response, 0 where all are the same; other tokens 0."""
    low = np.full(len(tokens.sizes), np.inf)
    high = np.full(len(tokens.sizes), -np.inf)
    np.minimum.at(low, tokens.rollout[live], values[live])
    np.maximum.at(high, tokens.rollout[live], values[live])
    spread = np.where(high > low, high - low, 1.0)
    low = np.where(np.isfinite(low), low, 0.0)
    return np.where(live, (values - low[tokens.rollout]) / spread[tokens.rollout], 0.0)
