"""Demonstrations that a model makes itself: its first right response to each task."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.distributed import World
from rlvr.records import Rollout, Task
from rlvr.rollout import Draw, Sampling
from rlvr.run.open_sampling import open_sampling

RIGHT = 1.0
"""The score of a right response; a verifier that gives parts of it gives this to a whole one."""
BLOCK = 64
"""Tasks that are sampled at a time: rows are written while the model works."""


def demonstrated(config: Config, tasks: Sequence[Task], samples: int) -> Iterator[Placed]:
    """Yield each task as a row, with a right response of the configuration's model as `demonstration` where one of
    `samples` is right.

    The model, engine, verifier, template, temperature and length are those of `config`.
    """
    sampling = Sampling(config.rollout.max_new_tokens, config.rollout.temperature, stop=tuple(config.rollout.stop))
    world = World.from_environment(config.distributed.heartbeat_timeout)
    try:
        with open_sampling(config, tasks, world) as opened, opened.stop:
            for begin in range(0, len(tasks), BLOCK):
                draws = [Draw(number, task) for number, task in enumerate(tasks[begin : begin + BLOCK], begin)]
                found = _first_right(opened.collect(draws, sampling, samples))
                for draw in draws:
                    yield draw.task.named, _row(draw.task, found.get(draw.task.id))
                print(f"{begin + len(draws)}/{len(tasks)} tasks sampled", file=sys.stderr)
    finally:
        world.close()


def _first_right(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Task id -> text of its first right response."""
    right: dict[str, str] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.member):
        verdict = rollout.verdict
        if verdict is not None and verdict.score is not None and verdict.score >= RIGHT:
            right.setdefault(rollout.task.id, rollout.text)
    return right


def _row(task: Task, response: str | None) -> dict[str, object]:
    row: dict[str, object] = {"prompt": task.prompt, "answer": task.answer}
    if response is not None:
        row["demonstration"] = response
    return row
