"""Modifiers: what is done to advantages after they were estimated, one after the other, as `algorithm.modifiers` lists.

A modifier is a function of the batch and of its advantages, one number per response or one array per response, that
gives advantages of either form. Invariants: undecided responses and tokens that the policy did not write have 0 before
and after, and stay out of every statistic; at its neutral setting a modifier changes no number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.advantages.group import AdvantageValues, FlatTokens, decided, elementwise, std
from rlvr.components import Modifier
from rlvr.core.needs import CURRENT, Need
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register


@register("modifier", "clip")
@dataclass(frozen=True)
class Clip(Modifier):
    """Advantages cut to [low, high]."""

    low: Scalar | None = -5.0
    """The smallest; null: no bound."""
    high: Scalar | None = 5.0
    """The largest; null: no bound."""

    def __post_init__(self) -> None:
        low = self.low
        high = self.high
        if (isinstance(low, (int, float)) and low > 0) or (isinstance(high, (int, float)) and high < 0):
            raise ValueError(f"the bounds [{low}, {high}] must hold 0, the advantage of undecided responses")

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        # -inf and inf stand for no bound.
        low, high = (np.inf * s if b is None else float(b) for b, s in ((self.low, -1), (self.high, 1)))
        return elementwise(np.clip, advantage, low, high)  # type: ignore[arg-type]


@register("modifier", "whiten")
@dataclass(frozen=True)
class Whiten(Modifier):
    """Advantages of the whole batch to mean 0 and standard deviation 1.

    The global normalisation of REINFORCE++ (Hu et al. 2025, arXiv 2501.03262) and the last step of GDPO; `over: tokens`
    and `unbiased: true` are verl's `masked_whiten`. Advantages that are all the same become 0.
    """

    over: Literal["tokens", "responses"] = "tokens"
    """tokens: a response counts as often as it has tokens; responses: once (for one advantage per response only)."""
    shift: bool = True
    """Subtract the mean; false: divide only."""
    unbiased: bool = False
    """The standard deviation with n - 1."""
    epsilon: float = 1e-8
    """Added to the standard deviation."""

    @property
    def per_response(self) -> bool:
        """Return True if it needs one advantage per response."""
        return self.over == "responses"

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        on = decided(batch)
        if not isinstance(advantage, list):
            # [B]: each advantage counts as often as its response has sampled tokens, or once; undecided responses count
            # 0 times.
            weights = (FlatTokens.of(batch).lengths if self.over == "tokens" else np.ones(len(batch))) * on
            return np.where(on, self._white(advantage, weights), 0.0)
        tokens = FlatTokens.of(batch)
        # bool [N]
        live = tokens.sampled & on[tokens.rollout]
        return tokens.split(np.where(live, self._white(tokens.flat(advantage), live.astype(np.float64)), 0.0))

    def _white(self, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        # All undecided, or no token sampled: np.average would divide by 0.
        if weights.sum() == 0:
            return np.zeros(len(values))
        spread = std(values, weights, self.unbiased)
        if self.shift:
            mean = np.average(values, weights=weights)
        else:
            mean = 0.0
        if spread > 0:
            return (values - mean) / (spread + self.epsilon)
        # Exactly 0, which the rounded mean of equal numbers may not give.
        return np.zeros(len(values)) if self.shift else values


@register("modifier", "outliers")
@dataclass(frozen=True)
class Outliers(Modifier):
    """Advantages further than some standard deviations of the batch from its mean become 0.

    The advantage filter of StableReinforce, with 3 (Zhang et al. 2025, arXiv 2505.02835); put `whiten` before it to
    have the standardised advantages too. The authors compare these with the mean before they are standardised, plus
    and minus 3 (yfzhang114/r1_reward, commit 3693413, openrlhf/trainer/ppo_utils/replay_buffer.py, `normalize`).
    Filtered responses still count in the loss's average.
    """

    deviations: Scalar = 3.0
    """The bound, above 0."""

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        on = decided(batch)
        tokens = None
        values = advantage
        if isinstance(advantage, list):
            tokens = FlatTokens.of(batch)
            on = tokens.sampled & on[tokens.rollout]
            values = tokens.flat(advantage)
        assert isinstance(values, np.ndarray)
        if on.any():
            # Strictly further: with a deviation of 0 nothing is further than 0 from the mean, and equal advantages
            # stay.
            far = np.abs(values - values[on].mean()) > float(self.deviations) * std(values[on])
            values = np.where(far, 0.0, values)
        if tokens is None:
            return values
        return tokens.split(values)


@register("modifier", "length")
@dataclass(frozen=True)
class Length(Modifier):
    """Each response's advantage times (its length / the batch's mean length) ^ power.

    Under `average: sequences`, power 1 makes every token of the batch weigh the same, and power -1 under
    `average: tokens` every response; 0 changes nothing. A response without tokens has 0 unless the power is 0.
    """

    power: Scalar = 1.0
    """The exponent."""

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        power = float(self.power)
        on = decided(batch)
        lengths = FlatTokens.of(batch).lengths
        # Power 0 has to be the identity, and 0 ** 0 = 1 would be it only for responses with tokens.
        if power == 0 or not lengths[on].any():
            return advantage
        ratio = lengths / lengths[on].mean()
        # The inner `where` keeps 0 ** a negative power from being computed, which would warn.
        weights = np.where(ratio > 0, np.where(ratio > 0, ratio, 1.0) ** power, 0.0)
        if isinstance(advantage, list):
            return [w * values for w, values in zip(weights, advantage, strict=True)]
        return weights * advantage


@register("modifier", "informative")
def informative(batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
    """All advantages times decided responses / those of them with an advantage, so that groups which teach nothing do
    not make the step smaller.

    The scale of GPG (Chu et al. 2025, arXiv 2504.02546): alpha = B / (B - M) with M responses in groups of equal
    rewards (github AMAP-ML/GPG, commit e096da8, README.md). verl's `gpg` divides by the share of responses whose reward
    is not 0 instead.
    """
    on = decided(batch)
    if isinstance(advantage, list):
        nonzero = np.asarray([a.any() for a in advantage], dtype=bool)
    else:
        nonzero = advantage != 0
    teaching = int((nonzero & on).sum())
    if teaching:
        # alpha = B / (B - M): decided responses over those with an advantage.
        return elementwise(np.multiply, advantage, on.sum() / teaching)
    return advantage


@register("modifier", "entropy")
@dataclass(frozen=True)
class Entropy(Modifier):
    """Each token's advantage plus min(scale x entropy, |advantage| / bound).

    "Reasoning with exploration" (Cheng et al. 2025, arXiv 2506.14758; the formula and the defaults of scale and bound
    from memory, since neither the paper's text nor code of its authors was opened). With a bound above 1 no sign
    changes; an advantage of 0 stays 0.
    """

    scale: Scalar = 0.4
    """Factor of the entropy in nats, at least 0; 0 changes nothing."""
    bound: float = 2.0
    """At most 1 / bound of the advantage is added; above 1."""

    needs = frozenset({Need("entropy")})
    per_token = True

    def __post_init__(self) -> None:
        if self.bound <= 1:
            raise ValueError(f"bound is {self.bound}: at 1 or below, entropy would turn negative advantages positive")

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> list[np.ndarray]:
        tokens = FlatTokens.of(batch)
        values = np.where(tokens.sampled, tokens.flat(advantage), 0.0)
        entropy = np.nan_to_num(tokens.flat(batch.tokens(f"entropy/{CURRENT}")), nan=0.0)
        # psi = min(alpha H, |A| / kappa) with alpha = scale and kappa = bound. [N]
        added = np.minimum(float(self.scale) * entropy, np.abs(values) / self.bound)
        return tokens.split(values + np.where(tokens.sampled & decided(batch)[tokens.rollout], added, 0.0))
