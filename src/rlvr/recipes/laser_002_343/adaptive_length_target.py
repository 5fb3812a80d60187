"""LASER-D: target lengths that follow what the policy needs, by difficulty."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rlvr.components import Monitoring, RewardContext, RewardTerm
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.terms import TermSpec, lengths


@register("reward", "adaptive_length_target")
@dataclass
class AdaptiveLengthTarget(RewardTerm):
    """A bonus for right answers within a target that follows what the policy needs, by difficulty.

    LASER-D (Liu et al. 2025, arXiv 2505.15612): groups are sorted by pass rate into `buckets` classes of difficulty,
    and a class's target is the shortest length within which its groups have, on average, one right answer. As in the
    paper that is measured on a monitoring set with `monitor_every`; without it on the last `window` groups of the class
    that were trained. `explore` also pays wrong answers that go beyond the target (LASER-DE). Before a class has a
    group, its target is `rollout.max_new_tokens`.

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
    """Groups of a class that its target is made from, without `monitor_every`."""
    lower: int | None = None
    """The shortest target, in tokens, the knob of the authors' scripts (4,096, 2,048 or 1,024); null: any length."""
    interval: int = 1024
    """With `lower`, the tokens between two candidates."""
    monitor_every: int | None = None
    """Measure on responses that are not trained, before the first step and each time after this number of steps (20 in
    the authors' scripts, `trainer.monitor_freq`); null: on the groups that were trained."""
    monitor_tasks: int = 500
    """Tasks of the stage that are measured on, drawn once: 500 in the authors' scripts (`data.monitor_files`). Each is
    answered `rollout.group_size` times."""
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
        if self.monitor_tasks < 1 or (self.monitor_every is not None and self.monitor_every < 1):
            raise ValueError("monitor_every and monitor_tasks must be at least 1")
        self._forget()

    def _forget(self) -> None:
        """Begin without any group; a monitoring is kept whole."""
        longest = self.window if self.monitor_every is None else None
        self._seen = [deque(maxlen=longest) for _ in range(self.buckets)]
        self._all = [deque(maxlen=longest) for _ in range(self.buckets)]

    def bind(self, setting: RewardContext) -> AdaptiveLengthTarget:
        """With the run's longest response."""
        bound = dataclasses.replace(self)
        bound._longest = float(setting.config.rollout.max_new_tokens)
        bound._size = setting.config.rollout.group_size
        return bound

    @property
    def monitoring(self) -> Monitoring | None:
        """The monitoring set, where there is one."""
        if self.monitor_every is None:
            return None
        return Monitoring(self.monitor_every, self.monitor_tasks, self._size)

    def monitored(self, batch: Batch, **given: Any) -> None:
        """Measure again: the groups of before are forgotten."""
        of: np.ndarray = given["of"]
        self._forget()
        used = lengths(batch)
        for group in batch.groups():
            index = group.index[np.isfinite(of[group.index])]
            if len(index):
                self._count(self._bucket(of[index]), *_lengths(used[index], of[index]))

    def __call__(self, batch: Batch, of: np.ndarray) -> np.ndarray:
        used = lengths(batch)
        targets = self.targets()
        result = np.where(np.isnan(of), np.nan, 0.0)
        self._new = []
        for group in batch.groups():
            index = group.index[np.isfinite(of[group.index])]
            if not len(index):
                continue
            bucket = self._bucket(of[index])
            within = used[index] <= targets[bucket]
            result[index] = self.alpha * np.where(of[index] >= 1.0, within, ~within & self.explore)
            if self.monitor_every is None:
                # Only noted: groups count from `observe` on, once for each trained step. Dynamic sampling scores draws
                # by themselves before the step is scored.
                self._new.append((bucket, *_lengths(used[index], of[index])))
        return result

    def _bucket(self, of: np.ndarray) -> int:
        """The class of a group with these values."""
        # Pass rate 1 belongs to the easiest class, not to one beyond it.
        return min(int((of >= 1.0).mean() * self.buckets), self.buckets - 1)

    def _count(self, bucket: int, right: list[float], answers: list[float]) -> None:
        self._seen[bucket].append(right)
        self._all[bucket].append(answers)

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
            self._count(bucket, right, answers)
        self._new = []

    def state_dict(self) -> dict[str, Any]:
        """The groups remembered."""
        return {"seen": [list(groups) for groups in self._seen], "all": [list(groups) for groups in self._all]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the groups of a checkpoint."""
        self._forget()
        for bucket in range(self.buckets):
            self._seen[bucket].extend(state["seen"][bucket])
            self._all[bucket].extend(state["all"][bucket])


def _lengths(used: np.ndarray, of: np.ndarray) -> tuple[list[float], list[float]]:
    """The sorted lengths of the right answers of a group, and the lengths of all."""
    return sorted(used[of >= 1.0].tolist()), used.tolist()
