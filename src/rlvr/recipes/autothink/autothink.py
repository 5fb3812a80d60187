"""AutoThink: rewards that depend on whether the response thinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec, lengths


@register("reward", "by_condition")
@dataclass(frozen=True)
class ByCondition(RewardTerm):
    """A table of four: right or wrong, and whether a condition holds.

    AutoThink's base reward is {right: [1, 2], wrong: [0, -1]} with the condition that the response does not think (Tu
    et al. 2025, arXiv 2505.10832). `balance` penalises the more frequent side of the condition: with p the share of the
    batch where the condition holds, those with it lose balance x max(0, p - 0.5) x 2, those without it balance x max(0,
    0.5 - p) x 2, so that neither dies out.
    """

    condition: TermSpec = "format"
    """A term that is 1 where the condition holds, else 0."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    right: tuple[float, float] = (1.0, 1.0)
    """Value of a right answer without the condition, and with it."""
    wrong: tuple[float, float] = (0.0, 0.0)
    """Value of a wrong answer without the condition, and with it."""
    balance: Scalar = 0.0
    """The largest amount that is subtracted on the more frequent side."""
    inner: ClassVar = ("condition", "of")

    def __call__(self, batch: Batch, condition: np.ndarray, of: np.ndarray) -> np.ndarray:
        holds = (condition >= 1.0).astype(np.int64)
        # `holds` is 0 or 1 for each rollout, [B], and indexes the pair (without, with).
        right, wrong = (np.asarray(pair)[holds] for pair in (self.right, self.wrong))
        values = np.where(of >= 1.0, right, wrong)
        undecided = np.isnan(condition) | np.isnan(of)
        # p; 0.5 where nothing is decided, so that no side loses anything.
        share = holds[~undecided].mean() if (~undecided).any() else 0.5
        # From 0 at p = 0.5 to 1 at p = 0 or 1: the factor of 2 makes `balance` the largest penalty.
        excess = 2 * np.maximum(0.0, np.where(holds == 1, share - 0.5, 0.5 - share))
        return np.where(undecided, np.nan, values - float(self.balance) * excess)


@register("reward", "exponential_length")
@dataclass(frozen=True)
class ExponentialLength(RewardTerm):
    """exp(-alpha z) - 1 for a right answer and 1 - exp(-beta z) for a wrong one, z the standardised length.

    The length term of AutoThink's third stage (Tu et al. 2025, arXiv 2505.10832), as `_reweight_rewards` of the
    authors' code (TU2021/AutoThink, verl/verl/trainer/main_ppo.py) adds it to the table: z is the length in tokens,
    less its mean over the right (of a wrong answer, the wrong) answers of the group, over their standard deviation with
    n - 1.
    So right answers are worth more the shorter they are, and wrong ones the longer. 0 where a group has one of the
    kind.
    """

    alpha: Scalar = 0.05
    """Strength among right answers, 0 or more."""
    beta: Scalar = 0.05
    """Strength among wrong answers, 0 or more."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = lengths(batch)
        result = np.where(np.isnan(of), np.nan, 0.0)
        for group in batch.groups():
            index = group.index[np.isfinite(of[group.index])]
            right = index[of[index] >= 1.0]
            wrong = index[of[index] < 1.0]
            if len(right) > 1:
                result[right] = np.exp(-float(self.alpha) * _standardised(used[right])) - 1
            if len(wrong) > 1:
                result[wrong] = 1 - np.exp(-float(self.beta) * _standardised(used[wrong]))
        return result


def _standardised(values: np.ndarray) -> np.ndarray:
    # 1e-6 tokens, the authors' bound, keeps equal lengths at 0.
    return (values - values.mean()) / max(float(values.std(ddof=1)), 1e-6)


@register("reward", "no_thinking")
@dataclass(frozen=True)
class NoThinking(RewardTerm):
    """1 where the response does not think: there is nothing but white space before `closing`; else 0.

    A response without `closing` thinks to its end. The condition of adaptive thinking (`by_condition`).
    """

    opening: str = "<think>"
    """The text that opens the thinking, in the response or in the prompt already."""
    closing: str = "</think>"
    """The text that ends the thinking."""

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([self._skips(r.text) for r in batch.rollouts], dtype=np.float64)

    def _skips(self, text: str) -> bool:
        before, closed, _ = text.partition(self.closing)
        # `opening` may be in the prompt already, so it may be absent here.
        return bool(closed) and not before.strip().removeprefix(self.opening).strip()
