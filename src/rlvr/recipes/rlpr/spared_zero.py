"""A reward with a penalty that spares a reward of 0, as in RLPR's trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.components import RewardTerm
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec


@register("reward", "spared_zero")
@dataclass(frozen=True)
class SparedZero(RewardTerm):
    """A term and a penalty beside it where the term is not 0; 0 where it is.

    RLPR (Yu et al. 2025, arXiv 2506.18254; OpenBMB/RLPR, commit 8490fca, verl/trainer/ppo/ray_trainer.py, `fit`): the
    penalty is added at the tokens whose reward is not 0, of which a response has one, its last, or none.
    """

    term: TermSpec = "verdict"
    """The term that is paid."""
    penalty: TermSpec = "repetition"
    """The term that is added to it, at most 0 as a rule."""
    inner: ClassVar = ("term", "penalty")

    def __call__(self, batch: Batch, term: np.ndarray, penalty: np.ndarray) -> np.ndarray:
        return np.where(term == 0, 0.0, term + penalty)
