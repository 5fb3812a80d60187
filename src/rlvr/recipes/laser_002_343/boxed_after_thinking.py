"""The form that LASER's reward asks for: a boxed answer after the thinking."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rlvr.components import RewardTerm
from rlvr.records import Batch
from rlvr.registry import register

# Matches "\boxed{2}", "\boxed{\frac{1}{2}}"; must not match "\boxed{2". Braces within the box, two deep, as in
# `extract_last_boxed` of the authors.
_BOX = re.compile(r"\\boxed\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}")


@register("reward", "boxed_after_thinking")
@dataclass(frozen=True)
class BoxedAfterThinking(RewardTerm):
    r"""1 where a whole \boxed{} stands after the first `closing` and before a second one; else 0.

    hkust-nlp/Laser, verl/utils/reward_score/hf_math_verifier.py, `compute_score`, whose reward is -1 otherwise. The
    `<think>` that it asks for too stands in the prompt of the model that it trains.
    """

    closing: str = "</think>"
    """The text that ends the thinking."""

    def __call__(self, batch: Batch) -> np.ndarray:
        parts = [rollout.text.split(self.closing) for rollout in batch.rollouts]
        found = [len(part) > 1 and _BOX.search(part[1]) is not None for part in parts]
        return np.asarray(found, dtype=np.float64)
