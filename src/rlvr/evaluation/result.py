"""The object that an evaluation is written as, with intervals, and read back from; and several runs (seeds) on the same
tasks as one result.

Several runs as in Agarwal et al. 2021 (rliable): the mean and the interquartile mean over all runs and tasks, with
intervals by a stratified bootstrap: runs are drawn anew within each task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.config import Config
from rlvr.errors import DataError
from rlvr.evaluation.estimators import interquartile_mean, interval
from rlvr.evaluation.evaluation_loop import Evaluation
from rlvr.evaluation.held_out import longest_response
from rlvr.evaluation.paired_comparison import comparison_lines
from rlvr.evaluation.task_result import TaskResult, by_difficulty, summary, values_of
from rlvr.monitor.whole_file import write_whole

VERSION = 1
"""Of the written object."""
IN_UNITS = frozenset({"tasks", "length_mean", "answer_entropy", "brier", "length_correlation"})
"""Results that are no shares: a count, tokens, nats, a squared error, a correlation."""


def describe(done: Evaluation, config: Config) -> dict[str, Any]:
    """The object that is written: results with intervals, by source, by difficulty, and by task."""
    settings = config.evaluation
    task_results = done.task_results
    how = (settings.k, settings.greedy, settings.samples > 0)
    sources = dict.fromkeys(t.source for t in task_results)
    results = _with_intervals(task_results, *how)
    return {
        "version": VERSION,
        "model": config.model.path,
        "samples": settings.samples,
        "k": settings.k,
        "sampling": {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        | {"max_new_tokens": longest_response(config), "seed": config.run.seed},
        "scorer": None if settings.scorer is None else settings.scorer.written,
        "results": results,
        "answer_entropy": results.get("answer_entropy"),
        "by_source": {str(s): _with_intervals([t for t in task_results if t.source == s], *how) for s in sources},
        "by_difficulty": {level: _with_intervals(part, *how) for level, part in by_difficulty(task_results).items()},
        "by_task": [task_result.to_json() for task_result in task_results],
    }


def _with_intervals(
    task_results: Sequence[TaskResult], ks: Sequence[int], greedy: bool, samples: bool
) -> dict[str, Any]:
    plain = summary(task_results, ks, greedy, samples)
    values = values_of(task_results, ks)
    results: dict[str, Any] = {}
    for name, value in plain.items():
        results[name] = value
        if name in values and value is not None:
            results[f"{name} interval"] = interval(values[name])
    if samples and results.get("mean") is not None:
        # NaN differs from itself: what is left are the tasks that have a mean.
        means = values["mean"][values["mean"] == values["mean"]]
        results["iqm"] = float(interquartile_mean(means))
        results["iqm interval"] = interval(means, interquartile_mean)
    return results


def write_task_results(path: Path, task_results: Sequence[TaskResult], **more: Any) -> None:
    """Write what is known of each task as a file that `read_result` reads, whole or not at all."""
    rows = {"version": VERSION, **more, "by_task": [task_result.to_json() for task_result in task_results]}
    write_whole(path, json.dumps(rows) + "\n")


def combined(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The written object of an evaluation on several benchmarks, by name; that of the only one as it is."""
    first = next(iter(results.values()))
    if len(results) == 1:
        return dict(first)
    return {"version": VERSION, "model": first["model"], "benchmarks": dict(results)}


def result_lines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The results of an evaluation for a reader, one line each: shares in percent with their intervals, and where the
    result has them the comparison with an earlier one and the overlap with training tasks."""
    lines = []
    for name, result in results.items():
        label = f"{name} " if name else ""
        values = {n: v for n, v in result["results"].items() if not n.endswith(" interval") and v is not None}
        width = max(14, *map(len, values))
        for quantity, value in values.items():
            low_high = result["results"].get(f"{quantity} interval")
            if quantity in IN_UNITS:
                lines.append(f"{label}{quantity:>{width}}  {value:.4g}")
                continue
            span = f"  (95 %: {100 * low_high[0]:.1f} to {100 * low_high[1]:.1f} %)" if low_high else ""
            meaning = "  mean of the middle half of the tasks" if quantity == "iqm" else ""
            lines.append(f"{label}{quantity:>{width}}  {100 * value:.1f} %{span}{meaning}")
        if (comparison := result.get("comparison")) is not None:
            lines.append(f"{label}compared on {comparison['tasks']} tasks:")
            lines += [f"{label}  {line}" for line in comparison_lines(comparison)]
        if (overlap := result.get("contamination")) is not None:
            lines.append(
                f"{label}contamination: {overlap['contaminated']} of {overlap['tasks']} tasks share {overlap['words']} "
                "consecutive words, or a whole shorter prompt, with a training prompt"
            )
    return lines


def read_result(path: Path, benchmark: str = "") -> list[TaskResult]:
    """The results by task of a written result; of one on several benchmarks, those of `benchmark`. DataError where it
    is none, or does not have the benchmark."""
    try:
        written: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "benchmarks" in written:
            if benchmark not in written["benchmarks"]:
                has = ", ".join(written["benchmarks"])
                raise DataError(f"{path} has results of {has}, not of {benchmark or 'other tasks'}")
            written = written["benchmarks"][benchmark]
        return [TaskResult.from_json(row) for row in written["by_task"]]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    # Whatever a JSON file of somebody else makes of it: no JSON, no `by_task`, rows with other keys, a list.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no result of rlvr.evaluate") from error


def over_runs(runs: Sequence[Sequence[TaskResult]], ks: Sequence[int]) -> dict[str, Any]:
    """Result -> `mean`, `iqm`, their intervals, the mean of each run (`runs`) and how many `tasks` count.

    A task counts for a result where all runs have it. DataError where the runs have no task in common.
    """
    by_id = [{task_result.id: task_result for task_result in of_run} for of_run in runs]
    common = []
    if by_id:
        # A run may have been evaluated on fewer tasks (`evaluation.limit`): all count the same ones.
        common = [name for name in by_id[0] if all(name in of_run for of_run in by_id)]
    if not common:
        raise DataError("the runs have no task in common: they can only be put together on the same tasks")
    values = [values_of([of_run[name] for name in common], ks) for of_run in by_id]
    results = {}
    for name in values[0]:
        matrix = np.stack([of_run[name] for of_run in values])  # [R, T]
        matrix = matrix[:, ~np.isnan(matrix).any(axis=0)]
        if matrix.size:
            results[name] = means(matrix) | {"runs": matrix.mean(axis=1).tolist(), "tasks": matrix.shape[1]}
    return results


def means(values: np.ndarray) -> dict[str, Any]:
    """Mean and interquartile mean of the values of runs [R], or of runs and tasks [R, T], with their intervals."""
    return {
        "mean": float(values.mean()),
        "interval": interval(values),
        # Over all R x T values, as in rliable, and not the mean of each run's.
        "iqm": float(interquartile_mean(values.reshape(-1))),
        "iqm interval": interval(values, interquartile_mean),
    }
