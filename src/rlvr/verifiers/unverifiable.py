"""Errors about tasks that their verifiers cannot check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlvr.errors import DataError
from rlvr.records import Task
from rlvr.verifiers.base import Verifier

SHOWN = 3
"""Tasks that an error names."""


def without_verifier(task: Task) -> DataError:
    """The error about a task for which nothing says how it is checked."""
    return DataError(
        f"{task.named} names no verifier and the config sets none: set `verifier`, for example verifier=math"
    )


def problem_of(task: Task, own: Verifier | None, named: Iterable[tuple[Verifier, str]]) -> str | None:
    """The reason why its own verifier, or one that judges by name, cannot check a task; None where all can."""
    problem = None if own is None else own.check_task(task)
    for verifier, name in named:
        if problem is None and (of_named := verifier.check_task(task)) is not None:
            problem = f"verifiers.{name}: {of_named}"
    return problem


def refuse_unverifiable(bad: Sequence[tuple[Task, str]]) -> None:
    """DataError that names the first of the tasks that cannot be checked, each with its problem, and counts them."""
    if not bad:
        return
    shown = "\n".join(
        f"  {task.id}: {problem}{f' ({task.place})' if task.place else ''}" for task, problem in bad[:SHOWN]
    )
    counted = f"{len(bad)} task{'s' if len(bad) > 1 else ''}"
    raise DataError(f"{counted} cannot be verified; correct or remove:\n{shown}")
