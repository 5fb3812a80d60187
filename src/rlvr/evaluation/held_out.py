"""Checks of the tasks that a run or a command evaluates on, made before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlvr.config import Config
from rlvr.data.prompts import refuse_long
from rlvr.errors import ConfigError
from rlvr.records import Task


def longest_response(config: Config) -> int:
    """Tokens that a response of an evaluation may have."""
    return config.evaluation.max_new_tokens or config.rollout.max_new_tokens


def check_held_out(config: Config, any_tasks: bool, stages: int = 1) -> None:
    """ConfigError where evaluations, or a best checkpoint by one, are asked for and there are no tasks.

    `stages`: those of the run.

    `at_start` and `at_end` are true by default and mean "where there are tasks", so only `every` asks for them.
    """
    if any_tasks:
        return
    every = config.evaluation.every
    best = config.checkpoint.best
    if every:
        raise ConfigError(
            f"evaluation.every is {every}, and there are no tasks to evaluate on: set data.eval or evaluation.data "
            "(in Python, eval_tasks=...), or evaluation.every to 0"
        )
    # With several stages another one may have tasks.
    if best is not None and best.metric.startswith("eval/") and stages < 2:
        raise ConfigError(
            f"checkpoint.best.metric is {best.metric}, and there are no tasks to evaluate on: set data.eval or "
            "evaluation.data (in Python, eval_tasks=...), or a metric of training steps such as reward/mean"
        )


def check_lengths(
    config: Config, tasks: Sequence[Task], lengths: np.ndarray, context: int, warn: Callable[[str], None]
) -> None:
    """DataError for a task whose prompt fills the context; `warn` of those whose responses it cuts.

    `lengths`: tokens of each task's prompt, int32 [N].
    """
    # Training tasks that are too long may be left out by the configuration; evaluation tasks never, as that changes the
    # score.
    refuse_long(tasks, lengths, context)
    wanted = longest_response(config)
    cut = int((lengths > context - wanted).sum())
    if cut:
        key = "evaluation" if config.evaluation.max_new_tokens else "rollout"
        warn(
            f"a context of {context} tokens (the smaller one of the model's and the engine's) leaves fewer than "
            f"{key}.max_new_tokens={wanted} for responses to {cut} of {len(tasks)} evaluation tasks, which end there"
        )
