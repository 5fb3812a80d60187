"""Rows that the model of a recipe makes itself: a right response as demonstration, or one response as answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rlvr.config import Config
from rlvr.config.config_loading import make_config
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

    The model, engine, verifier, template, sampling and length are those of `config`.
    """
    for task, rollouts in _sampled(config, tasks, samples):
        row: dict[str, object] = {"prompt": task.prompt, "answer": task.answer}
        response = _first_right(rollouts)
        if response is not None:
            row["demonstration"] = response
        yield task.named, row


def responded(config: Config, tasks: Sequence[Task]) -> Iterator[Placed]:
    """Yield each task as a row whose `answer` is one response of the configuration's model; nothing is verified.

    The model, engine, template, sampling and length are those of `config`.
    """
    # The recipe's own verifier may compare with the answers that are made here, or load a reward model.
    unverified = {"verifier": {"name": "regex", "pattern": "(?s).+"}, "verifiers": {}, "rewards": ["verdict"]}
    config = make_config(config.dump() | unverified | {"models": {}})
    for task, (rollout,) in _sampled(config, tasks, 1):
        yield task.named, {"prompt": task.prompt, "answer": rollout.text}


def _sampled(config: Config, tasks: Sequence[Task], samples: int) -> Iterator[tuple[Task, list[Rollout]]]:
    """Yield each task with its responses in the order of their members."""
    rollout = config.rollout
    truncation = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}
    sampling = Sampling(rollout.max_new_tokens, rollout.temperature, stop=tuple(rollout.stop), **truncation)
    world = World.from_environment(config.distributed.heartbeat_timeout)
    try:
        with open_sampling(config, tasks, world) as opened, opened.stop:
            for begin in range(0, len(tasks), BLOCK):
                draws = [Draw(number, task) for number, task in enumerate(tasks[begin : begin + BLOCK], begin)]
                found: dict[str, list[Rollout]] = {draw.task.id: [] for draw in draws}
                for one in sorted(opened.collect(draws, sampling, samples), key=lambda one: one.member):
                    found[one.task.id].append(one)
                for draw in draws:
                    yield draw.task, found[draw.task.id]
                print(f"{begin + len(draws)}/{len(tasks)} tasks sampled", file=sys.stderr)
    finally:
        world.close()


def _first_right(rollouts: Sequence[Rollout]) -> str | None:
    """The text of the first right response."""
    for rollout in rollouts:
        verdict = rollout.verdict
        if verdict is not None and verdict.score is not None and verdict.score >= RIGHT:
            return rollout.text
    return None
