"""The reward of Light-IF: points for each constraint that is met, and 1 more where all are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from rlvr.components import RewardTerm
from rlvr.records import Batch, Rollout
from rlvr.registry import register

# Points of each kind of constraint by validate_article_step_score_en of Qihoo360/Light-IF, commit 01e9003,
# rl/verl/verl/utils/reward_score/IF.py, under the names of IFEval: 0.05 for a bound from one side, 0.1 for a place or
# an exact number.
_POINTS = MappingProxyType(
    {
        "change_case:capital_word_frequency": 0.05,
        "combination:repeat_prompt": 0.1,
        "detectable_content:number_placeholders": 0.05,
        "detectable_format:number_bullet_lists": 0.1,
        "detectable_format:number_highlighted_sections": 0.05,
        "keywords:existence": 0.05,
        "keywords:forbidden_words": 0.05,
        "keywords:frequency": 0.05,
        "keywords:letter_frequency": 0.05,
        "length_constraints:nth_paragraph_first_word": 0.1,
        "length_constraints:number_paragraphs": 0.1,
        "length_constraints:number_sentences": 0.05,
        "length_constraints:number_words": 0.05,
        "startend:end_checker": 0.1,
    }
)


@register("reward", "constraint_points")
@dataclass(frozen=True)
class ConstraintPoints(RewardTerm):
    """The points of the constraints that a response meets, by the scores of the verifier `instructions`, and `bonus`
    where it meets all; 0 for a response without `</think>`.

    Points and bonus as `compute_score` of Qihoo360/Light-IF, commit 01e9003, rl/verl/verl/utils/reward_score/IF.py,
    whose own kinds of constraints have those of IFEval in their place here. Values are at least 0; NaN where the
    verdict is undecided.
    """

    other: float = 0.05
    """Points of a kind that the authors do not have."""
    bonus: float = 1.0
    """Added where every constraint is met."""

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([self._value(rollout) for rollout in batch.rollouts], dtype=np.float64)

    def _value(self, rollout: Rollout) -> float:
        if rollout.verdict is None or not rollout.verdict.decided:
            return float("nan")
        met: Mapping[str, float] = rollout.verdict.scores
        if "</think>" not in rollout.text or not met:
            return 0.0
        # `id#2` is the second constraint of a kind.
        points = sum(_POINTS.get(name.partition("#")[0], self.other) for name, value in met.items() if value)
        return points + self.bonus * all(met.values())
