"""Checks of held-out tasks before training starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.config import EvaluationConfig
from rlvr.data.prompts import refuse_long
from rlvr.errors import ConfigError
from rlvr.records import Task


def check_held_out(asked: EvaluationConfig, tasks: Sequence[Task], lengths: np.ndarray, context: int) -> None:
    """ConfigError where evaluations are asked for and there are no tasks; DataError for a prompt that fills the context.

    `lengths`: tokens of each task's prompt, int32 [N].

    `at_start` and `at_end` are true by default and mean "where there are tasks", so only `every` asks for them.
    """
    if asked.every and not tasks:
        raise ConfigError(
            f"evaluation.every is {asked.every}, and there are no tasks to evaluate on: set data.eval or evaluation.data (in "
            "Python, eval_tasks=...), or evaluation.every to 0"
        )
    refuse_long(tasks, lengths, context)
