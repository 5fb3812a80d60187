"""The three rewards of the second stage of "A Practical Two-Stage Recipe for Mathematical LLMs", over characters.

Their lengths are characters of the response, as in finetune/grpo_rewards.py of the authors' code
(analokmaus/kaggle-aimo2-fast-math-r1). `brevity`, and `cosine_length` of another recipe, count tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.schedules import Scalar
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec

# Matches "so \boxed{2} it is</think>"; must not match "so</think> \boxed{2}". `oxed`, because a tokenizer may have
# decoded \b as a backspace.
_BOXED_IN_THINKING = re.compile(r"oxed\{.*?\}.*?</think>", re.DOTALL)


def _characters(batch: Batch) -> np.ndarray:
    """float64 [B]: the characters of each response."""
    return np.asarray([len(r.text) for r in batch.rollouts], dtype=np.float64)


@register("reward", "boxed_in_thinking")
@dataclass(frozen=True)
class BoxedInThinking(RewardTerm):
    r"""1 where a \boxed{} answer stands before </think>, so that a response may be stopped there; else 0."""

    def __call__(self, batch: Batch) -> np.ndarray:
        found = [_BOXED_IN_THINKING.search(r.text) is not None for r in batch.rollouts]
        return np.asarray(found, dtype=np.float64)


@register("reward", "cosine_characters")
@dataclass(frozen=True)
class CosineCharacters(RewardTerm):
    """long + (short - long) (1 + cos(pi min(1, L / longest))) / 2 with L in characters, right and wrong apart.

    The cosine reward of `cosine_length`, without a value of its own for a response that is too long.
    """

    right: tuple[float, float] = (1.0, 0.1)
    """Value of an empty right answer, and of one of `longest` characters or more."""
    wrong: tuple[float, float] = (-1.0, -0.1)
    """The same of a wrong answer."""
    longest: int = 30000
    """Characters at which the value is that of a long answer."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        # 1 at length 0, 0 from `longest` on.
        way = (1 + np.cos(np.pi * np.minimum(_characters(batch) / self.longest, 1.0))) / 2
        (r0, r1) = self.right
        (w0, w1) = self.wrong
        values = np.where(of >= 1.0, r1 + (r0 - r1) * way, w1 + (w0 - w1) * way)
        return np.where(np.isnan(of), np.nan, values)


@register("reward", "brief_characters")
@dataclass(frozen=True)
class BriefCharacters(RewardTerm):
    """alpha (0.5 - (L - shortest) / (longest - shortest)) over the group, L in characters, for wrong answers at most 0.

    The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3), as `brevity` with `form: kimi` has it over tokens.
    A group of one length has 0. Undecided members have no value and stay out of shortest and longest.
    """

    alpha: Scalar = 1.0
    """Strength, 0 or more."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = _characters(batch)
        result = np.where(np.isnan(of), np.nan, 0.0)
        for group in batch.groups():
            index = group.index[np.isfinite(of[group.index])]
            if not len(index) or used[index].min() == used[index].max():
                continue
            low = used[index].min()
            bonus = 0.5 - (used[index] - low) / (used[index].max() - low)
            result[index] = float(self.alpha) * np.where(of[index] >= 1.0, bonus, np.minimum(bonus, 0.0))
        return result
