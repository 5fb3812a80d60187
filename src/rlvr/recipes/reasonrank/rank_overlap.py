"""Agreement of a ranking with a reference ranking, weighted towards the top."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.components import RewardTerm
from rlvr.records import Batch, Rollout, VerdictStatus
from rlvr.registry import register

# "d3 > d1 > doc-7.b" gives d3, d1, doc-7.b; brackets, commas and ">" separate.
_ID = re.compile(r"[\w.-]+")


@register("reward", "rank_overlap")
@dataclass(frozen=True)
class RankOverlap(RewardTerm):
    """Rank-biased overlap of the extracted ranking with a given one (Webber et al. 2010, eq. 4, of finite lists): the
    mean over depths d of their first d places' overlap, weighted by p^(d - 1), over the same of a perfect agreement.

    A part of ReasonRank's reward (Liu et al. 2025, arXiv 2508.07050), whose code takes p = 1, the mean overlap. The
    given ranking is a list in the task's info, best first; without it the ids of the task's answer by grade. 0 where no
    ranking was extracted or the verifier refused it, undecided where the verdict is. An id that is repeated counts
    where it stands first.
    """

    given: str = "ranking"
    """The field of the task's info with the given ranking."""
    p: float = 0.9
    """Factor of the weight from each depth to the next, above 0; 1: all depths weigh the same."""

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"p is {self.p}: it must be above 0 and at most 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([self._score(r) for r in batch.rollouts], dtype=np.float64)

    def _score(self, rollout: Rollout) -> float:
        if rollout.verdict is None or not rollout.verdict.decided:
            return float("nan")
        if rollout.verdict.status is VerdictStatus.UNPARSABLE:
            return 0.0
        ranking = list(dict.fromkeys(_ID.findall(rollout.verdict.answer or "")))
        return _overlap(ranking, self._reference(rollout), self.p)

    def _reference(self, rollout: Rollout) -> list[str]:
        ranking = rollout.task.info.get(self.given)
        if ranking is None and isinstance(rollout.task.answer, dict):
            ranking = sorted(rollout.task.answer, key=lambda one: -rollout.task.answer[one])
        return [str(one) for one in ranking or ()]


def _overlap(ranking: Sequence[str], reference: Sequence[str], p: float) -> float:
    seen: set[str] = set()
    wanted: set[str] = set()
    shared = total = weights = 0.0
    for d, name in enumerate(reference):
        # Invariant: `shared` = |ranking[:d+1] & reference[:d+1]|. The reference's item is counted if the ranking had it
        # at a smaller depth, the ranking's item if the reference has it by now, so that an item at the same depth in
        # both is counted once.
        wanted.add(name)
        shared += name in seen
        if d < len(ranking):
            seen.add(ranking[d])
            shared += ranking[d] in wanted
        # RBO@k = (1 - p) sum_d p^(d-1) overlap_d / d; the factor cancels in the quotient. `d` counts from 0 here.
        weights += p**d
        total += p**d * shared / (d + 1)
    return total / weights if weights else 0.0
