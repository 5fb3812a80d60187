"""Held-out evaluation: greedy score, pass@k, maj@k and mean over tasks, from verified rollouts.

Tasks are gone through in blocks, and of each only its `Tally` is kept, so that memory does not grow with tasks x samples.

Invariants: an undecided verdict (our own trouble) is left out of a task's samples and counted; a task with none decided is
left out of the means; results do not depend on the blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.config import Config
from rlvr.evaluation.levels import by_difficulty
from rlvr.evaluation.tally import Tally, summary, tally_of
from rlvr.records import Rollout, Task
from rlvr.rollout import Draw, Sampling

Collect = Callable[[Sequence[Draw], Sampling, int], list[Rollout]]
"""(draws of tasks, sampling, samples per task) -> verified rollouts"""
Scorer = Callable[[Sequence[Rollout]], np.ndarray]
"""What is liked of each of a task's samples, without looking at its verdict; the more the better."""

SameAnswer = Callable[[Task, str, str], bool]
"""(task, first, second) -> whether two extracted answers to the task are the same, as its own verifier sees it"""

BLOCK = 4096
"""Rollouts that are held at a time, where one task's samples are not more."""


def same_text(task: Task, first: str, second: str) -> bool:
    """Compare two answers as they are written, where no verifier is at hand."""
    return first == second


@dataclass
class Evaluation:
    """The results of one evaluation: metric name -> value, and what is known of each task."""

    results: dict[str, float | None]
    tallies: list[Tally]


def evaluate(
    tasks: Sequence[Task],
    config: Config,
    collect: Collect,
    same: SameAnswer = same_text,
    said: Callable[[int], None] = lambda done: None,
    scorer: Scorer | None = None,
) -> Evaluation:
    """Evaluate on `tasks` as `config.evaluation` says; `said` is told how many tasks are done.

    `same` tells answers apart for maj@k and the answer entropy. It is asked with the task, because each task of a mixed set
    has the verifier that it names.

    Results: `eval/greedy` (mean score of greedy responses), `eval/mean` (mean score of samples), `eval/pass@k`,
    `eval/maj@k`, with a `scorer` `eval/best@k`, `eval/truncated`, `eval/unparsable`, `eval/undecided` (shares of responses),
    `eval/length_mean` (tokens), `eval/answer_entropy` (nats) and `eval/tasks`; where tasks are of several sources or levels of
    difficulty, also greedy, mean, pass@k and best@k of each as `eval/SOURCE/...` and `eval/difficulty/LEVEL/...`.
    """
    asked = config.evaluation
    budget, stop = asked.max_new_tokens or config.rollout.max_new_tokens, tuple(config.rollout.stop)
    greedy = Sampling(budget, temperature=0.0, stop=stop)
    sampling = Sampling(budget, asked.temperature, asked.top_p, asked.top_k, asked.min_p, stop)
    tallies: list[Tally] = []
    size = max(1, BLOCK // max(asked.samples, 1))
    for begin in range(0, len(tasks), size):
        draws = [Draw(begin + place, task) for place, task in enumerate(tasks[begin : begin + size])]
        block = [tally_of(draw.task, asked.difficulty) for draw in draws]
        if asked.greedy:
            for number, rollouts in _by_draw(collect(draws, greedy, 1)).items():
                block[number - begin].add_greedy(rollouts)
        if asked.samples:
            for number, rollouts in _by_draw(collect(draws, sampling, asked.samples)).items():
                liked = None if scorer is None else scorer(rollouts)
                of_task = functools.partial(same, tasks[number])
                block[number - begin].add_samples(rollouts, asked.k, of_task, liked)
        tallies += block
        said(len(tallies))
    return Evaluation(_results(tallies, config), tallies)


def _by_draw(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    """Rollouts by the number of their draw, which begins the name of their group."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(int(rollout.group.split("/")[0]), []).append(rollout)
    return found


def _results(tallies: Sequence[Tally], config: Config) -> dict[str, float | None]:
    asked = config.evaluation
    how = (asked.k, asked.greedy, asked.samples > 0)
    results = {f"eval/{name}": value for name, value in summary(tallies, *how).items()}
    for part, members in parts(tallies).items():
        for name, value in summary(members, *how).items():
            if name.startswith(("greedy", "mean", "pass@", "best@")):
                results[f"eval/{part}/{name}"] = value
    return results


def parts(tallies: Sequence[Tally]) -> dict[str, list[Tally]]:
    """The tasks by source, and by level of difficulty (`difficulty/LEVEL`), where there are several."""
    sources = {str(s): [t for t in tallies if t.source == s] for s in dict.fromkeys(t.source for t in tallies)}
    levels = {f"difficulty/{level}": members for level, members in by_difficulty(tallies).items()}
    return (sources if len(sources) > 1 else {}) | (levels if len(levels) > 1 else {})
