"""The reward of "Warm Up Before You Train": an answer in its form first, then its box, then its value."""

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
from rlvr.verifiers.answers import last_boxed

_TAGS = ("</think>", "<answer>", "</answer>")
# Matches "so it is</think> <answer>\boxed{2}</answer>"; must not match an empty thought, or text after the answer.
_FORM = re.compile(r".+</think>\s*<answer>(.+)</answer>\s*\Z", re.DOTALL)


@register("reward", "tagged_answer")
@dataclass(frozen=True)
class TaggedAnswer(RewardTerm):
    r"""2 for a right answer, -0.5 for a wrong one, -1 without a \boxed{} inside <answer>, -2 without the form.

    The form is `...</think> <answer>...</answer>`, each tag once and nothing after it: the prompt has opened `<think>`.
    Numbers and form as `reward_correct` of safal312/warmup-before-you-train, train/dataset_loader.py.
    """

    right: Scalar = 2.0
    """Value of a right answer in the form."""
    wrong: Scalar = -0.5
    """Value of a wrong answer in the form."""
    unboxed: Scalar = -1.0
    """Value of an answer in the form without a box."""
    formless: Scalar = -2.0
    """Value of every other response."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        values = np.where(of >= 1.0, float(self.right), float(self.wrong))
        # An undecided verdict matters only where the form and the box are there.
        values = np.where(np.isnan(of), np.nan, values)
        for i, rollout in enumerate(batch.rollouts):
            answer = _answer(rollout.text)
            if answer is None:
                values[i] = float(self.formless)
            elif last_boxed(answer) is None:
                values[i] = float(self.unboxed)
        return values


def _answer(text: str) -> str | None:
    """The text inside <answer> of a response in the form; None of another one."""
    if any(text.count(tag) != 1 for tag in _TAGS):
        return None
    match = _FORM.match(text)
    return match[1] if match else None
