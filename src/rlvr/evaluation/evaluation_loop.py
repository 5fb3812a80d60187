"""Held-out evaluation: greedy score, pass@k, maj@k and mean over tasks, from verified rollouts.

Tasks are gone through in blocks, first with greedy responses and then with samples, and of each only its `TaskResult`
is kept, so that memory does not grow with tasks x samples.

Invariants: an undecided verdict (a fault of the run) is left out of a task's samples and counted; a task with none
decided is left out of the means; results do not depend on the blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rlvr.config import Config
from rlvr.evaluation.held_out import longest_response
from rlvr.evaluation.task_result import TaskResult, by_difficulty, empty_result, summary
from rlvr.records import Rollout, Task
from rlvr.verifiers.raised_verdicts import RaisedVerdicts

if TYPE_CHECKING:  # it loads torch, which whoever only reads results does not need
    from rlvr.rollout import Draw, Sampling

Collect: TypeAlias = "Callable[[Sequence[Draw], Sampling, int], list[Rollout]]"
"""(draws of tasks, sampling, samples per task) -> verified rollouts"""
Scorer = Callable[[Sequence[Rollout]], np.ndarray]
"""A number for each of a task's samples, [n], computed without its verdict; the largest is chosen."""

SameAnswer = Callable[[Task, str, str], bool]
"""(task, first, second) -> whether two extracted answers to the task are the same, as its own verifier sees it"""

# A choice that bounds memory: 4,096 rollouts of 1,000 tokens are some 100 MB. Results do not depend on it.
BLOCK = 4096
"""Rollouts that are held at a time, where one task's samples are not more."""
# A choice: eight tasks with all their samples, after which a verifier that raised on every one is refused.
FIRST = 8
"""Tasks that are sampled first where no greedy responses were: enough to tell a broken verifier from a bad task."""


def same_text(task: Task, first: str, second: str) -> bool:
    """Compare two answers as they are written, where no verifier is at hand."""
    return first == second


@dataclass
class Evaluation:
    """The results of one evaluation: metric name -> value, and what is known of each task."""

    results: dict[str, float | None]
    task_results: list[TaskResult]
    raised: RaisedVerdicts = field(default_factory=RaisedVerdicts)


def evaluate(
    tasks: Sequence[Task],
    config: Config,
    collect: Collect,
    same: SameAnswer = same_text,
    scorer: Scorer | None = None,
    judge: Callable[[RaisedVerdicts], None] = lambda verdicts: None,
) -> Evaluation:
    """Evaluate on `tasks` as `config.evaluation` says.

    `judge` sees the verdicts of all greedy responses, without these of the samples of the first few tasks, and then
    those of all responses, and may raise: an evaluation whose verifier always raises ends before all is sampled, and
    one bad task ends none.

    `same` tells answers apart for maj@k and the answer entropy. It is asked with the task, because each task of a mixed
    set has the verifier that it names.

    Results: `eval/greedy` (mean score of greedy responses), `eval/mean` (mean score of samples), `eval/pass@k`,
    `eval/maj@k`, with a `scorer` `eval/best@k`, `eval/truncated`, `eval/unparsable`, `eval/undecided` (shares of
    responses), `eval/length_mean` (tokens), `eval/answer_entropy` (nats) and `eval/tasks`; where tasks are of several
    sources or levels of difficulty, also greedy, mean, pass@k and best@k of each as `eval/SOURCE/...` and
    `eval/difficulty/LEVEL/...`.
    """
    from rlvr.rollout import Sampling

    settings = config.evaluation
    budget = longest_response(config)
    # Those of training: a policy learned to end its answers by them.
    stop = tuple(config.rollout.stop)
    greedy = Sampling(budget, temperature=0.0, stop=stop)
    sampling = Sampling(budget, settings.temperature, settings.top_p, settings.top_k, settings.min_p, stop)
    task_results = [empty_result(task, settings.difficulty) for task in tasks]
    raised = RaisedVerdicts()
    if settings.greedy:
        for draws in _blocks(tasks, BLOCK):
            rollouts = collect(draws, greedy, 1)
            raised.add(rollouts)
            for number, responses in _by_draw(rollouts).items():
                task_results[number].add_greedy(responses)
        # Before the samples, which cost as many times more as there are samples of a task.
        judge(raised)
    if settings.samples:
        alike = (
            len({task.verifier for task in tasks}) == 1
        )  # else the first few may be of one verifier, and others sound
        first = FIRST if alike and not settings.greedy else None
        for draws in _blocks(tasks, max(1, BLOCK // settings.samples), first):
            rollouts = collect(draws, sampling, settings.samples)
            raised.add(rollouts)
            for number, samples in _by_draw(rollouts).items():
                ranking = None if scorer is None else scorer(samples)
                # The verifier that the task names decides which of its answers are the same.
                of_task = functools.partial(same, tasks[number])
                task_results[number].add_samples(samples, settings.k, of_task, ranking)
            if draws[-1].number + 1 == first:
                judge(raised)
        judge(raised)
    return Evaluation(_results(task_results, config), task_results, raised)


def _blocks(tasks: Sequence[Task], size: int, first: int | None = None) -> Iterator[list[Draw]]:
    """Draws of at most `size` tasks at a time; one block ends with the task number `first`."""
    from rlvr.rollout import Draw

    begin = 0
    while begin < len(tasks):
        end = begin + size
        if first is not None and begin < first:
            end = min(end, first)
        draws = [Draw(number, task) for number, task in enumerate(tasks[begin:end], begin)]
        yield draws
        begin += len(draws)


def _by_draw(rollouts: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    """Rollouts by the number of their draw, which begins the name of their group."""
    by_draw: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_draw.setdefault(int(rollout.group.split("/")[0]), []).append(rollout)
    return by_draw


def _results(task_results: Sequence[TaskResult], config: Config) -> dict[str, float | None]:
    settings = config.evaluation
    how = (settings.k, settings.greedy, settings.samples > 0)
    results = {f"eval/{name}": value for name, value in summary(task_results, *how).items()}
    for part, members in parts(task_results).items():
        for name, value in summary(members, *how).items():
            # maj@k, truncation and the others are not given by part, to keep the number of metrics within bounds.
            if name.startswith(("greedy", "mean", "pass@", "best@")):
                results[f"eval/{part}/{name}"] = value
    return results


def parts(task_results: Sequence[TaskResult]) -> dict[str, list[TaskResult]]:
    """The tasks by source, and by level of difficulty (`difficulty/LEVEL`), where there are several."""
    sources = {
        str(s): [t for t in task_results if t.source == s] for s in dict.fromkeys(t.source for t in task_results)
    }
    levels = {f"difficulty/{level}": members for level, members in by_difficulty(task_results).items()}
    # One part is the whole, which is there already.
    return (sources if len(sources) > 1 else {}) | (levels if len(levels) > 1 else {})
