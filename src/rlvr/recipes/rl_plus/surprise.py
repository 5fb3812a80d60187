"""A weight of tokens that the policy was unlikely to sample: RL-PLUS's factor, on sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.advantages.group import AdvantageValues, FlatTokens
from rlvr.components import Modifier
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register


@register("modifier", "surprise")
@dataclass(frozen=True)
class Surprise(Modifier):
    """Each token's advantage times (1 - p) ^ power, p the probability that the token was sampled with.

    The factor of RL-PLUS's exploration-based advantage (Dong et al. 2025, arXiv 2508.00222) on the tokens that the
    policy sampled. The paper has it on external tokens alone, which is the auxiliary loss `external_policy`; no recipe
    uses this. At power 0 nothing changes.
    """

    power: Scalar = 1.0
    """The exponent, at least 0."""
    negative: bool = True
    """Weigh negative advantages too."""

    per_token = True
    reads_behaviour_logprobs = True

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> list[np.ndarray]:
        tokens = FlatTokens.of(batch)
        values = np.where(tokens.sampled, tokens.flat(advantage), 0.0)
        # float64 [N], NaN where unknown.
        logprobs = tokens.flat([r.behaviour_logprobs for r in batch.rollouts])
        on = tokens.sampled & np.isfinite(logprobs) & (self.negative | (values > 0))
        # At most 1: an engine's rounding may give a log-prob above 0, and a negative base with a power like 0.5 is NaN.
        p = np.exp(np.minimum(np.where(on, logprobs, -np.inf), 0.0))
        weight = (1.0 - p) ** float(self.power)
        return tokens.split(np.where(on, weight, 1.0) * values)
