"""Several runs (seeds) on the same tasks as one result.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (rliable): the mean and the
interquartile mean over all runs and tasks, with intervals by a stratified bootstrap: runs are drawn anew within each
task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr.errors import DataError
from rlvr.evaluation.intervals import interquartile_mean, interval
from rlvr.evaluation.task_result import TaskResult, values_of


def over_runs(runs: Sequence[Sequence[TaskResult]], ks: Sequence[int]) -> dict[str, Any]:
    """Result -> `mean`, `iqm`, their intervals, the mean of each run (`runs`) and how many `tasks` count.

    A task counts for a result where all runs have it. DataError where the runs have no task in common.
    """
    by_id = [{task_result.id: task_result for task_result in of_run} for of_run in runs]
    if by_id:
        # A run may have been evaluated on fewer tasks (`evaluation.limit`): all count the same ones.
        common = [name for name in by_id[0] if all(name in of_run for of_run in by_id)]
    else:
        common = []
    if not common:
        raise DataError("the runs have no task in common: they can only be put together on the same tasks")
    values = [values_of([of_run[name] for name in common], ks) for of_run in by_id]
    results = {}
    for name in values[0]:
        matrix = np.stack([of_run[name] for of_run in values])  # [R, T]
        matrix = matrix[:, ~np.isnan(matrix).any(axis=0)]
        if matrix.size:
            results[name] = {
                "mean": float(matrix.mean()),
                "interval": interval(matrix),
                # Over all R x T values, as in rliable, and not the mean of each run's.
                "iqm": float(interquartile_mean(matrix.reshape(-1))),
                "iqm interval": interval(matrix, interquartile_mean),
                "runs": [float(of_run) for of_run in matrix.mean(axis=1)],
                "tasks": matrix.shape[1],
            }
    return results
