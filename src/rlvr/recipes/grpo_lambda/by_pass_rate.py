"""The switch of GRPO-lambda: one of two terms for each group, by its pass rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.composition import pass_rates
from rlvr.rewards.terms import TermSpec


@register("reward", "by_pass_rate")
@dataclass(frozen=True)
class ByPassRate(RewardTerm):
    """One of two terms for each group, by its pass rate: `then` where it is high, `otherwise` elsewhere.

    The switch of GRPO-lambda (Dai et al. 2025, arXiv 2505.18086): a length penalty only where the group is right often
    enough, so that it does not make accuracy collapse. `top` is the paper's batch-relative form: the share of the
    batch's groups with the highest pass rates; of groups that tie at the border the first ones by name are in. `top: 1`
    and `at_least: 0` are `then` alone.
    """

    then: TermSpec = "brevity"
    """The term of groups with a high pass rate."""
    otherwise: TermSpec = "verdict"
    """The term of the other groups."""
    of: TermSpec = "verdict"
    """The term whose mean over the decided members is the pass rate."""
    at_least: Scalar | None = None
    """The pass rate is high from here on; null with `top` given, else 0.5."""
    top: Scalar | None = None
    """In place of `at_least`: the share of the batch's groups whose pass rate counts as high, the highest first."""
    inner: ClassVar = ("then", "otherwise", "of")

    def __post_init__(self) -> None:
        if self.at_least is not None and self.top is not None:
            raise ValueError("`at_least` and `top` exclude each other: set one to null")

    def __call__(self, batch: Batch, then: np.ndarray, otherwise: np.ndarray, of: np.ndarray) -> np.ndarray:
        groups = batch.group_index()
        high = self._high(pass_rates(of, groups), np.asarray([group.key for group in batch.groups()], dtype=str))
        if len(batch):
            return np.where(high[groups], then, otherwise)
        return np.zeros(0)

    def _high(self, rates: np.ndarray, names: np.ndarray) -> np.ndarray:
        """bool [G], False for groups without a decided member."""
        if self.top is None:
            return rates >= (0.5 if self.at_least is None else float(self.at_least))
        decided = np.flatnonzero(np.isfinite(rates))
        # The tolerance is for products such as 0.07 x 100 = 7.000000000000001, whose ceiling would be 8.
        count = int(np.ceil(float(self.top) * len(decided) - 1e-9))
        # Exactly `count` groups are taken where many have the same rate, whatever the order of the rollouts is.
        highest_first = decided[np.lexsort((names[decided], -rates[decided]))]
        high = np.zeros(len(rates), dtype=bool)
        high[highest_first[:count]] = True
        return high
