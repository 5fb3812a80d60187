"""Checks of held-out tasks before training starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.config import Config
from rlvr.data.prompts import refuse_long
from rlvr.errors import ConfigError
from rlvr.records import Task


def check_held_out(config: Config, tasks: Sequence[Task], lengths: np.ndarray, context: int, stages: int = 1) -> None:
    """ConfigError where evaluations, or a best checkpoint by one, are asked for and there are no tasks; DataError for a
    prompt that fills the context.

    `lengths`: tokens of each task's prompt, int32 [N]. `stages`: those of the run.

    `at_start` and `at_end` are true by default and mean "where there are tasks", so only `every` asks for them.
    """
    evaluation = config.evaluation
    best = config.checkpoint.best
    if evaluation.every and not tasks:
        raise ConfigError(
            f"evaluation.every is {evaluation.every}, and there are no tasks to evaluate on: set data.eval or "
            "evaluation.data (in Python, eval_tasks=...), or evaluation.every to 0"
        )
    # With several stages another one may have tasks.
    if best is not None and best.metric.startswith("eval/") and not tasks and stages < 2:
        raise ConfigError(
            f"checkpoint.best.metric is {best.metric}, and there are no tasks to evaluate on: set data.eval or "
            "evaluation.data (in Python, eval_tasks=...), or a metric of training steps such as reward/mean"
        )
    # Training tasks that are too long may be left out by the configuration; evaluation tasks never, as that changes the
    # score.
    refuse_long(tasks, lengths, context)
