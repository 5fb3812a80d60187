"""Rewards for lengths: of the response itself (DAPO's soft overlong penalty); against a target that is fixed, from the
task, or relative to the group; and of a right answer against the other right answers of its group, so that hard prompts
may have long answers.

Lengths are tokens that the policy wrote. Where `max_length` is null it is the run's `rollout.max_new_tokens`. Undecided
members have no value and stay out of every statistic.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rlvr.components import RewardContext, RewardTerm
from rlvr.config import Config
from rlvr.core.schedules import Scalar
from rlvr.errors import ConfigError
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.composition import pass_rates
from rlvr.rewards.terms import TermSpec, lengths


@dataclass(frozen=True, kw_only=True)
class OfRightAndWrong(RewardTerm):
    """A term whose value depends on whether a response is right."""

    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)


@register("reward", "soft_overlong")
@dataclass(frozen=True)
class SoftOverlong(RewardTerm):
    """0 up to max_length - cache tokens, then falling in a line to -1 at max_length and beyond.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13).
    """

    max_length: int | None = None
    """Tokens at which -1 is reached; null: `rollout.max_new_tokens`."""
    cache: int | None = None
    """Tokens over which the penalty grows, 1 to max_length; null: a fifth of max_length, as in the paper (4,096 of
    20,480)."""

    def _bounds(self, config: Config) -> tuple[int, int]:
        """`max_length` and `cache`, in tokens."""
        most = self.max_length or config.rollout.max_new_tokens
        # DAPO: L_max 20,480 with L_cache 4,096.
        cache = max(1, most // 5) if self.cache is None else self.cache
        return most, cache

    def check_config(self, config: Config) -> None:
        """ConfigError where the penalty would grow over more tokens than a response may have."""
        most, cache = self._bounds(config)
        if not 1 <= cache <= most:
            raise ConfigError(f"rewards: soft_overlong has cache {cache}, and it must be 1 to max_length, {most}")

    def bind(self, setting: RewardContext) -> SoftOverlong:
        """With the run's longest response."""
        most, cache = self._bounds(setting.config)
        return dataclasses.replace(self, max_length=most, cache=cache)

    def __call__(self, batch: Batch) -> np.ndarray:
        assert self.max_length is not None and self.cache is not None, "bind was not called"
        # R(L) = ((L_max - L_cache) - L) / L_cache between L_max - L_cache and L_max, 0 below and -1 above.
        return np.clip((self.max_length - self.cache - lengths(batch)) / self.cache, -1.0, 0.0)


@register("reward", "length_target")
@dataclass(frozen=True)
class LengthTarget(OfRightAndWrong):
    """The value of the length, to be added to the verdict.

    - step: alpha for a right answer of at most `target` tokens, else 0 (LASER, Liu et al. 2025, arXiv 2505.15612;
      hkust-nlp/Laser, commit c9e7c4e, verl/utils/reward_score/length_penalty.py, compute_length_reward_larse).
    - exact: -alpha |target - L| (L1-Exact, Aggarwal & Welleck 2025, arXiv 2503.04697, eq. 1; alpha there 0.0003).
    - at_most: for a right answer clip(alpha (target - L) + 0.5, 0, 1), else 0 (L1-Max, eq. 2, where it is multiplied
      with the verdict: it replaces the verdict then).
    """

    target: Scalar | str = 256
    """Tokens, or the name of a field of the task's info that holds them."""
    form: Literal["step", "exact", "at_most"] = "step"
    """The formula."""
    alpha: Scalar = 0.5
    """Strength: the bonus of step, the slope of the others."""
    relative: Literal["right", "all"] | None = None
    """The target is a factor of the mean length of the group's right answers (of its decided members where none is
    right), or of all its decided members; null: it is in tokens."""

    def bind(self, setting: RewardContext) -> LengthTarget:
        """Checks that the tasks have the field."""
        if isinstance(self.target, str):
            for task in setting.tasks:
                value = task.info.get(self.target)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                    raise ConfigError(
                        f"rewards: length_target takes its target from info.{self.target}, and {task.named} has "
                        f"{value!r} there: a number above 0 is needed"
                    )
        return self

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = lengths(batch)
        right = of >= 1.0
        alpha = float(self.alpha)
        target = self._targets(batch)
        if self.relative is not None:
            # `target` is a factor here, and the product is in tokens, [B]; NaN in groups without a decided member,
            # whose values are NaN anyway.
            target = target * typical_lengths(used, of, batch, self.relative == "right")
        if self.form == "step":
            values = np.where(right & (used <= target), alpha, 0.0)
        elif self.form == "exact":
            # L1-Exact: r = [right] - alpha |n_target - n|; the verdict is a term of its own.
            values = -alpha * np.abs(target - used)
        else:
            # L1-Max: delta = 0.5, so that a right answer of exactly the target's length has half of the reward.
            values = np.where(right, np.clip(alpha * (target - used) + 0.5, 0.0, 1.0), 0.0)
        return np.where(np.isnan(of), np.nan, values)

    def _targets(self, batch: Batch) -> np.ndarray:
        if isinstance(self.target, str):
            return np.asarray([r.task.info[self.target] for r in batch.rollouts], dtype=np.float64)
        return np.full(len(batch), float(self.target))


def typical_lengths(used: np.ndarray, of: np.ndarray, batch: Batch, right_first: bool) -> np.ndarray:
    """float64 [B]: the mean length of the group's right answers if asked and there are any, else of its decided
    members; else NaN."""
    groups = batch.group_index()
    everyone = pass_rates(np.where(np.isnan(of), np.nan, used), groups)
    right = pass_rates(np.where(of >= 1.0, used, np.nan), groups)
    if right_first:
        return np.where(np.isnan(right), everyone, right)[groups]
    return everyone[groups]


@register("reward", "brevity")
@dataclass(frozen=True)
class Brevity(OfRightAndWrong):
    """The value of a right answer by its length compared within the group; wrong answers are worth 0.

    - sigmoid: 1 - alpha sigmoid((L - mean) / std) over the right answers (Arora & Zanette 2025, arXiv 2502.04463, eq.
      4; also the penalty of GRPO-lambda, arXiv 2505.18086, read in a write-up of third parties).
    - range: 1 + alpha (longest - L) / (longest - shortest) over the right answers (a bonus; a guess at the formula of
      arXiv 2506.15647, whose text was not read and of which no code was found).
    - kimi: alpha (0.5 - (L - shortest) / (longest - shortest)) over all members, for wrong answers at most 0 (Kimi
      k1.5, arXiv 2501.12599, section 2.3.3); it is added to the verdict, while the other two replace it.

    Where all lengths are the same, (L - mean) / std and the range terms are 0. alpha 0 is the verdict (for kimi, 0).
    """

    form: Literal["sigmoid", "range", "kimi"] = "sigmoid"
    """The formula."""
    alpha: Scalar = 0.2
    """Strength, 0 or more."""

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = lengths(batch)
        alpha = float(self.alpha)
        shape = {"sigmoid": self._sigmoid, "range": self._range, "kimi": self._kimi}[self.form]
        result = np.where(np.isnan(of), np.nan, 0.0)
        for group in batch.groups():
            if self.form == "kimi":
                # Kimi k1.5 takes min_len and max_len over all responses of the prompt, right or wrong.
                compared = np.isfinite(of[group.index])
            else:
                compared = of[group.index] >= 1.0
            index = group.index[compared]
            if len(index):
                result[index] = shape(used[index], of[index] >= 1.0, alpha)
        return result

    @staticmethod
    def _sigmoid(used: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
        # z-score of the length among the right answers; population standard deviation (divided by n). Where all lengths
        # are the same it is 0 / 1.
        z = (used - used.mean()) / (used.std() or 1.0)
        # 1 - alpha sigmoid(z): longer than the mean costs more than alpha / 2, shorter less. |z| is at most sqrt(n -
        # 1), so exp does not overflow.
        return 1 - alpha / (1 + np.exp(-z))

    @staticmethod
    def _range(used: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
        # The shortest right answer has 1 + alpha, the longest 1; all have 1 where all lengths are the same.
        return 1 + alpha * (used.max() - used) / ((used.max() - used.min()) or 1.0)

    @staticmethod
    def _kimi(used: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
        span = used.max() - used.min()
        if span > 0:
            # lambda = 0.5 - (len - min_len) / (max_len - min_len), from 0.5 for the shortest to -0.5 for the longest.
            bonus = 0.5 - (used - used.min()) / span
        else:
            bonus = np.zeros(len(used))
        # A wrong answer gains nothing by being short: min(0, lambda).
        return alpha * np.where(right, bonus, np.minimum(bonus, 0.0))
