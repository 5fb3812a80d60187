"""The result of a task once its responses are judged, the summary of a set of results, and tasks by their difficulty.

Invariants:
- A `TaskResult` is small and does not grow with the number of samples: rollouts are dropped once they are counted.
- An undecided verdict (a fault of the run, not of the answer) is no sample; it is counted. A task with none decided is
  left out of the means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlvr.evaluation.estimators import best_of_k, clusters, majority_at_k, pass_at_k
from rlvr.records import Rollout, Task, VerdictStatus

Same = Callable[[str, str], bool]


@dataclass
class TaskResult:
    """The results of one task."""

    id: str
    source: str | None = None
    difficulty: str | float | None = None
    """The value of the field `evaluation.difficulty` of the task's info."""
    samples: int = 0
    """Decided samples, the greedy response apart."""
    correct: int = 0
    """Decided samples with a score of 1."""
    score: float | None = None
    """Mean score of the samples."""
    greedy: float | None = None
    """Score of the greedy response."""
    majority: dict[int, float] = field(default_factory=dict)
    """maj@k by k; empty where the verifier names no answers."""
    best: dict[int, float] = field(default_factory=dict)
    """best@k by k: the expected score of the one that the scorer ranks first."""
    answer_entropy: float | None = None
    """Entropy of the answers among the samples, in nats."""
    responses: int = 0
    truncated: int = 0
    unparsable: int = 0
    undecided: int = 0
    tokens: int = 0
    """Tokens of all responses."""
    greedy_responses: int = 0
    """The greedy ones among `responses`; 0 in files of earlier versions."""
    greedy_tokens: int = 0
    """Tokens of the greedy ones; 0 in files of earlier versions."""

    def add_greedy(self, rollouts: Sequence[Rollout]) -> None:
        """Take in the greedy response (its contexts, where a plan gives several)."""
        self._count(rollouts)
        self.greedy_responses += len(rollouts)
        self.greedy_tokens += sum(r.completion_length for r in rollouts)
        scores = [r.verdict.score for r in rollouts if r.verdict is not None and r.verdict.score is not None]
        self.greedy = float(np.mean(scores)) if scores else None

    def add_samples(
        self, rollouts: Sequence[Rollout], ks: Sequence[int], same: Same = str.__eq__, ranking: np.ndarray | None = None
    ) -> None:
        """Take in all samples of the task; `ranking` is a scorer's number for each, NaN where it has none."""
        self._count(rollouts)
        decided = [i for i, r in enumerate(rollouts) if r.verdict is not None and r.verdict.decided]
        verdicts = [v for i in decided if (v := rollouts[i].verdict) is not None]
        if not verdicts:
            return
        # pass@k counts full marks; partial scores are in `score`.
        right = [v.score == 1.0 for v in verdicts]
        answers = [v.answer for v in verdicts]
        self.samples = len(verdicts)
        self.correct = sum(right)
        self.score = float(np.mean([v.score for v in verdicts]))
        # A verifier that names no answers, such as a function that returns a number, leaves nothing to vote on. Where
        # it looked for one in vain the vote is lost.
        if any(v.answer is not None or v.status is VerdictStatus.UNPARSABLE for v in verdicts):
            # Not for k = 1, which is the mean of `right`, and not for more than were decided.
            self.majority = {k: majority_at_k(answers, right, k, same) for k in ks if 1 < k <= len(verdicts)}
        if ranking is not None:
            scores = [float(v.score or 0.0) for v in verdicts]
            # An undecided sample has no score that could be expected of it.
            self.best = {k: best_of_k(ranking[decided], scores, k) for k in ks if 1 < k <= len(scores)}
        counts = Counter(label for label in clusters(answers, same) if label is not None)
        shares = [count / counts.total() for count in counts.values()]
        if shares:
            # H = -sum p ln p over the clusters of answers. `+ 0.0` turns -0.0, for one cluster, into 0.0.
            self.answer_entropy = -sum(p * math.log(p) for p in shares) + 0.0
        else:
            self.answer_entropy = None

    def _count(self, rollouts: Sequence[Rollout]) -> None:
        self.responses += len(rollouts)
        self.truncated += sum(r.stop.truncated for r in rollouts)
        self.unparsable += sum(r.verdict is not None and r.verdict.status is VerdictStatus.UNPARSABLE for r in rollouts)
        self.undecided += sum(r.verdict is None or not r.verdict.decided for r in rollouts)
        self.tokens += sum(r.completion_length for r in rollouts)

    def pass_at(self, k: int) -> float | None:
        """The unbiased pass@k; None where fewer than k samples are decided."""
        if self.samples >= k:
            return pass_at_k(self.samples, self.correct, k)
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TaskResult:
        # JSON makes the keys of a mapping texts.
        by_k = {name: {int(k): v for k, v in row.get(name, {}).items()} for name in ("majority", "best")}
        return cls(**{**row, **by_k})


def empty_result(task: Task, difficulty: str = "difficulty") -> TaskResult:
    """The empty result of a task; `difficulty` is the field of its `info` with its level of difficulty."""
    level = task.info.get(difficulty)
    return TaskResult(task.id, task.source, level if isinstance(level, (str, int, float)) else None)


def values_of(task_results: Sequence[TaskResult], ks: Sequence[int]) -> dict[str, np.ndarray]:
    """Result -> its value for each task, NaN where it has none: greedy, mean, pass@k, maj@k, and best@k where there is
    one."""
    by_name = {"greedy": column([t.greedy for t in task_results]), "mean": column([t.score for t in task_results])}
    for k in ks:
        by_name[f"pass@{k}"] = column([t.pass_at(k) for t in task_results])
        if k > 1:  # a majority of one is a single sample
            by_name[f"maj@{k}"] = column([t.majority.get(k) for t in task_results])
            if any(t.best for t in task_results):
                by_name[f"best@{k}"] = column([t.best.get(k) for t in task_results])
    return by_name


def summary(
    task_results: Sequence[TaskResult], ks: Sequence[int], greedy: bool, samples: bool
) -> dict[str, float | None]:
    """Means over tasks, shares of responses and mean length; None where nothing is decided."""
    means = {name: mean(values) for name, values in values_of(task_results, ks).items()}
    # A result that was not asked for is absent; one without a decided verdict is None.
    shown = {name: value for name, value in means.items() if (greedy if name == "greedy" else samples)}
    responses = sum(t.responses for t in task_results)

    def share(count: int) -> float | None:
        return count / responses if responses else None

    return {
        "tasks": len(task_results),
        **shown,
        "truncated": share(sum(t.truncated for t in task_results)),
        "unparsable": share(sum(t.unparsable for t in task_results)),
        "undecided": share(sum(t.undecided for t in task_results)),
        "length_mean": share(sum(t.tokens for t in task_results)),
        **({"answer_entropy": mean(column([t.answer_entropy for t in task_results]))} if samples else {}),
    }


def column(values: Sequence[float | None]) -> np.ndarray:
    """The values as float64, NaN for None."""
    return np.asarray([math.nan if v is None else v for v in values], dtype=np.float64)


def mean(values: np.ndarray) -> float | None:
    """The mean of what is not NaN; None of nothing."""
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else None


# A choice: a table that fits a screen. Above it numbers become ranges, and words are taken for something else (a
# source, a topic).
MOST = 12
"""Largest number of levels that are reported one by one."""
RANGES = 5
"""Number of ranges, of about as many tasks each, into which more than MOST numeric levels are put."""


def by_difficulty(task_results: Sequence[TaskResult]) -> dict[str, list[TaskResult]]:
    """Level -> its tasks, from the easiest; empty where no task has one, or too many different words are used.

    Levels are the texts or numbers that tasks have; where there are many numbers, ranges of them.
    """
    rated = [t for t in task_results if t.difficulty is not None]
    numbers = {t.difficulty for t in rated if isinstance(t.difficulty, (int, float))}
    levels = {t.difficulty for t in rated}
    if len(levels) > MOST:
        if len(numbers) == len(levels):
            return _ranges(rated)
        return {}
    # Numbers by their size, then texts by their letters.
    # False sorts before True, so numbers come first; the second entry is never compared between a number and a text.
    ordered = sorted(levels, key=lambda level: (level not in numbers, level if level in numbers else 0, str(level)))
    return {
        f"{level:g}" if level in numbers else str(level): [t for t in rated if t.difficulty == level]
        for level in ordered
    }


def _ranges(rated: Sequence[TaskResult]) -> dict[str, list[TaskResult]]:
    values = np.asarray([t.difficulty for t in rated], dtype=np.float64)
    # `unique`, where many tasks have one level: equal edges would make empty ranges.
    edges = np.unique(np.quantile(values, np.linspace(0, 1, RANGES + 1)))
    place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    ranges = {}
    for number in range(max(len(edges) - 1, 1)):
        members = [t for t, at in zip(rated, place, strict=True) if at == number]
        if members:
            ranges[f"{edges[number]:.3g} to {edges[min(number + 1, len(edges) - 1)]:.3g}"] = members
    return ranges
