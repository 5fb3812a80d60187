"""LASER-D: target lengths that follow what the policy needs, by difficulty."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rlvr.components import RewardContext, RewardTerm
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec, lengths


@register("reward", "adaptive_length_target")
@dataclass
class AdaptiveLengthTarget(RewardTerm):
    """A bonus for right answers within a target that follows what the policy needs, by difficulty.

    LASER-D (Liu et al. 2025, arXiv 2505.15612): groups are sorted by pass rate into `buckets` classes of difficulty,
    and a class's target is the shortest length within which its groups have, on average, one right answer. The paper
    measures that on a monitoring set every few steps; here it is measured on the last `window` groups of the class that
    were trained, which is what differs. `explore` also pays wrong answers that go beyond the target (LASER-DE). Before
    a class has a group, its target is `rollout.max_new_tokens`.

    With `lower`, targets are chosen as in the authors' code (hkust-nlp/Laser, `_choose_target_length` in
    verl/utils/reward_score/length_penalty.py): the shortest of lower, lower + interval, lower + 2 interval ... with
    floor(coverage x m) of at least 1. coverage is the share of the class's answers, right or wrong, that are no longer,
    and m the least number of right answers of a group of the class, for groups of 8 in three classes 1, 2 and 5. So no
    target falls below `lower`.
    """

    alpha: float = 0.5
    """The bonus, to be added to the verdict."""
    # Three, as LASER-D (easy, medium, hard).
    buckets: int = 3
    """Classes of equal width of the pass rate."""
    # Arbitrary: a smaller window follows the policy faster and is noisier.
    window: int = 64
    """Groups of a class that its target is made from."""
    lower: int | None = None
    """The shortest target, in tokens, the knob of the authors' scripts (4,096, 2,048 or 1,024); null: any length."""
    interval: int = 1024
    """With `lower`, the tokens between two candidates."""
    explore: bool = False
    """Pay wrong answers of more than the target's length the bonus too."""
    of: TermSpec = "verdict"
    """The term that marks a response right (at least 1) or wrong."""
    inner: ClassVar = ("of",)
    _longest: float = field(default=np.inf, init=False, repr=False)
    _size: int = field(default=1, init=False, repr=False)
    """Members of a group."""
    _seen: list[deque[list[float]]] = field(default_factory=list, init=False, repr=False)
    """For each class, the lengths of the right answers of each of its last groups."""
    _all: list[deque[list[float]]] = field(default_factory=list, init=False, repr=False)
    """The same of all its answers."""
    _new: list[tuple[int, list[float], list[float]]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.buckets < 1 or self.window < 1:
            raise ValueError("buckets and window must be at least 1")
        if self.interval < 1 or (self.lower is not None and self.lower < 1):
            raise ValueError("lower and interval must be at least 1")
        self._seen = [deque(maxlen=self.window) for _ in range(self.buckets)]
        self._all = [deque(maxlen=self.window) for _ in range(self.buckets)]

    def bind(self, setting: RewardContext) -> AdaptiveLengthTarget:
        """With the run's longest response."""
        bound = dataclasses.replace(self)
        bound._longest = float(setting.config.rollout.max_new_tokens)
        bound._size = setting.config.rollout.group_size
        return bound

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = lengths(batch)
        targets = self.targets()
        result = np.where(np.isnan(of), np.nan, 0.0)
        self._new = []
        for group in batch.groups():
            index = group.index[np.isfinite(of[group.index])]
            if not len(index):
                continue
            right = of[index] >= 1.0
            # Pass rate 1 belongs to the easiest class, not to one beyond it.
            bucket = min(int(right.mean() * self.buckets), self.buckets - 1)
            within = used[index] <= targets[bucket]
            result[index] = self.alpha * np.where(right, within, ~within & self.explore)
            # Only noted: groups count from `observe` on, once for each trained step. Dynamic sampling scores draws by
            # themselves before the step is scored.
            self._new.append((bucket, sorted(used[index][right].tolist()), used[index].tolist()))
        return result

    def targets(self) -> list[float]:
        """Each class's target: the shortest length with one right answer per group on average, hardest class first."""
        if self.lower is not None:
            return [self._candidate(bucket, groups) for bucket, groups in enumerate(self._all)]
        targets = []
        for groups in self._seen:
            right = sorted(length for group in groups for length in group)
            # G groups need G right answers, one each on average: the G-th shortest length. With fewer there is no such
            # length, and responses may be as long as the run allows.
            targets.append(right[len(groups) - 1] if 0 < len(groups) <= len(right) else self._longest)
        return targets

    def _candidate(self, bucket: int, groups: Sequence[list[float]]) -> float:
        """The shortest candidate that leaves a group of the class one right answer."""
        assert self.lower is not None
        answers = [length for group in groups for length in group]
        # At least 1, also for the hardest class, whose groups may have no right answer.
        least = max(1, int(self._size * bucket / self.buckets))
        for target in range(self.lower, int(self._longest), self.interval):
            if answers and int(least * sum(length <= target for length in answers) / len(answers)) >= 1:
                return float(target)
        return self._longest

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """The step was trained: its groups count."""
        for bucket, right, answers in self._new:
            self._seen[bucket].append(right)
            self._all[bucket].append(answers)
        self._new = []

    def state_dict(self) -> dict[str, Any]:
        """The groups remembered."""
        return {"seen": [list(groups) for groups in self._seen], "all": [list(groups) for groups in self._all]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the groups of a checkpoint."""
        self._seen = [deque(groups, maxlen=self.window) for groups in state["seen"]]
        self._all = [deque(groups, maxlen=self.window) for groups in state["all"]]
