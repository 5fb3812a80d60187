"""Held-out evaluation: greedy score, pass@k, maj@k and mean over tasks, from verified rollouts.

Invariant: an undecided verdict (our own trouble) is left out of a task's samples and counted; a task with none decided is
left out of the means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.config import Config
from rlvr.evaluation.estimators import majority_at_k, pass_at_k
from rlvr.records import Rollout, Task, VerdictStatus
from rlvr.rollout import Sampling

Collect = Callable[[Sequence[Task], Sampling, int], list[Rollout]]
"""(tasks, sampling, samples per task) -> verified rollouts"""


@dataclass
class Evaluation:
    """The results of one evaluation: metric name -> value, and the rollouts that they come from."""

    results: dict[str, float | None]
    rollouts: list[Rollout]


def evaluate(
    tasks: Sequence[Task], config: Config, collect: Collect, same: Callable[[str, str], bool] = str.__eq__
) -> Evaluation:
    """Evaluate on `tasks` as `config.evaluation` says.

    Results: `eval/greedy` (share of correct greedy responses), `eval/mean` (mean score of samples), `eval/pass@k`,
    `eval/maj@k`, `eval/truncated`, `eval/unparsable`, `eval/undecided` (shares of responses), `eval/length_mean` (tokens)
    and `eval/tasks`.
    """
    asked = config.evaluation
    budget = asked.max_new_tokens or config.rollout.max_new_tokens
    stop = tuple(config.rollout.stop)
    results: dict[str, float | None] = {"eval/tasks": len(tasks)}
    rollouts: list[Rollout] = []
    if asked.greedy:
        greedy = collect(tasks, Sampling(budget, temperature=0.0, stop=stop), 1)
        results["eval/greedy"] = _mean([r.verdict.score for r in greedy if r.verdict and r.verdict.score is not None])
        rollouts += greedy
    if asked.samples:
        sampling = Sampling(budget, asked.temperature, asked.top_p, asked.top_k, asked.min_p, stop)
        sampled = collect(tasks, sampling, asked.samples)
        results |= _sampled_results(sampled, asked.k, same)
        rollouts += sampled
    return Evaluation(results | _shares(rollouts), rollouts)


def _sampled_results(
    rollouts: Sequence[Rollout], ks: Sequence[int], same: Callable[[str, str], bool]
) -> dict[str, float | None]:
    by_task: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.verdict is not None and rollout.verdict.decided:
            by_task.setdefault(rollout.task.id, []).append(rollout)
    results: dict[str, float | None] = {
        "eval/mean": _mean([_mean([r.verdict.score for r in members]) for members in by_task.values()])  # type: ignore[union-attr]
    }
    for k in ks:
        enough = [members for members in by_task.values() if len(members) >= k]
        results[f"eval/pass@{k}"] = _mean([pass_at_k(len(members), sum(_right(members)), k) for members in enough])
        if k > 1:  # a majority of one is a single sample
            votes = [majority_at_k(_answers(members), _right(members), k, same) for members in enough]
            results[f"eval/maj@{k}"] = _mean(votes)
    return results


def _right(members: Sequence[Rollout]) -> list[bool]:
    return [r.verdict is not None and r.verdict.score == 1.0 for r in members]


def _answers(members: Sequence[Rollout]) -> list[str | None]:
    return [r.verdict.answer if r.verdict else None for r in members]


def _shares(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    verdicts = [r.verdict for r in rollouts]
    return {
        "eval/truncated": _mean([r.stop.truncated for r in rollouts]),
        "eval/unparsable": _mean([v is not None and v.status is VerdictStatus.UNPARSABLE for v in verdicts]),
        "eval/undecided": _mean([v is None or not v.decided for v in verdicts]),
        "eval/length_mean": _mean([r.completion_length for r in rollouts]),
    }


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None
