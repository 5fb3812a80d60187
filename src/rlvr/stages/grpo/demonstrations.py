"""Demonstrations as rollouts that nobody sampled: a stage's whole batch, or beside sampled groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.config import AlgorithmConfig
from rlvr.data import render_demonstration
from rlvr.errors import ConfigError
from rlvr.losses import Objective
from rlvr.records import Batch, Rollout, Task
from rlvr.stages.grpo.appended import filler
from rlvr.stages.stage_base import StageContext


def demonstration(task: Task, context: StageContext, group: str, member: int = 0) -> Rollout:
    """The task's demonstration after its prompt, as a rollout of a group."""
    return Rollout.given(
        task,
        context.prompt(task),
        render_demonstration(task, context.policy.tokenizer),
        id=f"{group}/{member}" if member == 0 else f"{group}/demonstration",
        group=group,
        member=member,
        text=task.demonstration or "",
        role="demonstrator",
    )


def with_demonstrations(batch: Batch, context: StageContext, drawn: Sequence[Rollout] | None = None) -> Batch:
    """The batch, and after it one rollout for every group whose task has a demonstration.

    Their reward is NaN and their advantage and policy weight 0, so that nothing but a term on demonstrations reads
    them. `drawn`: the rollouts of the groups that are meant, of which the batch may lack some; the result is then by
    group, in their order. None: those of the batch.
    """
    groups = list((batch if drawn is None else Batch(list(drawn))).groups())
    shown = [
        # A member number after the last one keeps ids unique and ties in the order of the sampled members.
        demonstration(group.rollouts[0].task, context, group.key, 1 + max(r.member for r in group.rollouts))
        for group in groups
        if group.rollouts[0].task.demonstration
    ]

    def more(name: str, sizes: Sequence[int]) -> list[np.ndarray]:
        return [np.full(size, filler(name), dtype=np.float32) for size in sizes]

    result = Batch(
        [*batch.rollouts, *shown],
        {name: np.concatenate([column, *more(name, [len(shown)])]) for name, column in batch.columns.items()},
        {name: [*column, *more(name, [len(r) for r in shown])] for name, column in batch.token_columns.items()},
    )
    if drawn is None:
        return result
    # A batch is cut into optimizer steps by its groups in their order: those that are demonstrations alone must not all
    # be in the last one.
    place = {group.key: number for number, group in enumerate(groups)}
    return result.select(np.argsort([place[r.group] for r in result.rollouts], kind="stable"))


def check_demonstrations(algorithm: AlgorithmConfig, objective: Objective) -> None:
    """ConfigError where `demonstrations: sampled` says beside which groups they are learned, and none are."""
    if algorithm.demonstrations == "selected":
        return
    what = "algorithm.demonstrations is 'sampled', the groups beside which demonstrations are learned, and "
    if not any(component.loss.shows_demonstrations for component in objective.components):
        raise ConfigError(
            f"{what}no term learns them: add {{name: likelihood, on: demonstrations}} to algorithm.auxiliary, or leave "
            "demonstrations out"
        )
    if algorithm.supervised_steps is not None:
        raise ConfigError(f"{what}algorithm.supervised_steps learns them in steps of their own: leave one of them out")
