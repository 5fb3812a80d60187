"""Shapes of a reward over the response's own length: DAPO's soft overlong penalty and the cosine reward.

Lengths are tokens that the policy wrote. Where `max_length` is null it is the run's `rollout.max_new_tokens`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import RewardContext, RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.errors import ConfigError
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec, lengths


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

    def bind(self, setting: RewardContext) -> SoftOverlong:
        """With the run's longest response."""
        most = self.max_length or setting.config.rollout.max_new_tokens
        # DAPO: L_max 20,480 with L_cache 4,096.
        cache = max(1, most // 5) if self.cache is None else self.cache
        if not 1 <= cache <= most:
            raise ConfigError(f"rewards: soft_overlong has cache {cache}, and it must be 1 to max_length, {most}")
        return dataclasses.replace(self, max_length=most, cache=cache)

    def __call__(self, batch: Batch) -> np.ndarray:
        assert self.max_length is not None and self.cache is not None, "bind was not called"
        # R(L) = ((L_max - L_cache) - L) / L_cache between L_max - L_cache and L_max, 0 below and -1 above.
        return np.clip((self.max_length - self.cache - lengths(batch)) / self.cache, -1.0, 0.0)


@register("reward", "cosine_length")
@dataclass(frozen=True)
class CosineLength(RewardTerm):
    """Right or wrong, each worth a different amount by length: long + (short - long) (1 + cos(pi L / max_length)) / 2.

    The cosine reward (Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv 2502.03373; shape
    and ends confirmed in a copy of the authors' code): short right answers are worth most, short wrong ones least, and
    a response that reached max_length has one value. Replaces the verdict in `rewards`. With both ends the same it is
    the verdict.
    """

    right: tuple[float, float] = (2.0, 1.0)
    """Value of a right answer of length 0, and of one that is max_length long."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """The same of a wrong answer."""
    exceeded: Scalar = -10.0
    """Value of a response that is max_length long."""
    max_length: int | None = None
    """The longest response; null: `rollout.max_new_tokens`."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)

    def bind(self, setting: RewardContext) -> CosineLength:
        """With the run's longest response."""
        return dataclasses.replace(self, max_length=self.max_length or setting.config.rollout.max_new_tokens)

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        assert self.max_length is not None, "bind was not called"
        used = lengths(batch)
        # 1 at length 0, 0 at max_length: long + (short - long) way. `used` may exceed max_length, which the next lines
        # replace.
        way = (1 + np.cos(np.pi * np.minimum(used / self.max_length, 1.0))) / 2
        (r0, r1) = self.right
        (w0, w1) = self.wrong
        values = np.where(of >= 1.0, r1 + (r0 - r1) * way, w1 + (w0 - w1) * way)
        values = np.where(used >= self.max_length, float(self.exceeded), values)
        return np.where(np.isnan(of), np.nan, values)
