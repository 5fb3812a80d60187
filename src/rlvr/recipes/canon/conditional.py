"""Advantages within halves of a group, so that a property of responses is neither rewarded nor punished by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rlvr.advantages.group import FlatTokens
from rlvr.components import Advantage
from rlvr.core.needs import CURRENT, Need
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register


@register("advantage", "conditional")
@dataclass(frozen=True)
class Conditional(Advantage):
    """mix (r - mean of the other half) + (1 - mix) (r - mean of the own half), the halves by a metric of the response.

    CANON (Chen et al. 2025, arXiv 2509.23962, eq. 5; as in the authors' code, where mix is `_lambda` and alpha is 1):
    which half is better is read off the rewards, no direction of the metric is assumed. The decided members are sorted
    by the metric, ties by member; the lower half has the odd one less. With halves of one size and mix 0.5 this is the
    reward minus the group's mean, Dr. GRPO's advantage. A group with fewer than two decided members, or with equal
    rewards, has 0.
    """

    metric: Literal["length", "entropy"] = "length"
    """length: tokens that the policy wrote; entropy: their mean entropy under the policy before the update."""
    # The authors' default. At 0.5 halves of one size compare with the group's mean, and the metric has no effect.
    mix: Scalar = 1.0
    """Weight of the comparison between the halves, 0 to 1; the rest is that within."""
    smallest_group: ClassVar = 2

    @property
    def needs(self) -> frozenset[Need]:
        """The statistics of the policy that the estimator reads."""
        return frozenset({Need("entropy")} if self.metric == "entropy" else ())

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        metric = self._metric(batch)
        member = np.asarray([r.member for r in batch.rollouts], dtype=np.int64)
        result = np.zeros(len(batch))
        mix = float(self.mix)
        for group in batch.groups():
            index = group.index[np.isfinite(rewards[group.index])]
            # By metric, then by member, so that the order of rollouts in the batch does not matter.
            index = index[np.lexsort((member[index], metric[index]))]
            r = rewards[index]
            # floor(n / 2): of an odd number the lower half has one less.
            half = len(index) // 2
            if half == 0 or r.min() == r.max():
                continue
            # Mean rewards of the two halves: each response is compared with mix x the other one's and 1 - mix x its own
            # one's.
            low = r[:half].mean()
            high = r[half:].mean()
            upper = np.arange(len(index)) >= half
            result[index] = r - np.where(upper, mix * low + (1 - mix) * high, mix * high + (1 - mix) * low)
        return result

    def _metric(self, batch: Batch) -> np.ndarray:
        tokens = FlatTokens.of(batch)
        if self.metric == "length":
            return tokens.lengths
        # float64 [N], in nats; NaN where the policy did not sample.
        entropy = tokens.flat(batch.tokens(f"entropy/{CURRENT}"))
        finite = tokens.sampled & np.isfinite(entropy)
        return tokens.sums(np.where(finite, entropy, 0.0)) / np.maximum(tokens.sums(finite.astype(np.float64)), 1.0)
