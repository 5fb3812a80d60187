"""Which verifier checks which task: the configured one, or the one that the task names.

Invariant: every task has a verifier and a verifier accepts every task before training starts, or the run is refused with
the task's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlvr.errors import DataError
from rlvr.records import Rollout, Task
from rlvr.verifiers.base import Verifier, as_verifier
from rlvr.verifiers.pool import VerifierPool

SHOWN = 3
"""Bad tasks that an error names."""


class Verification:
    """Puts verdicts on rollouts. `verifier` (a Verifier, a function, or a piece as written) checks all tasks; None: each its own."""

    def __init__(self, verifier: Any, pool: VerifierPool) -> None:
        self.pool = pool
        self._default = None if verifier is None else as_verifier(verifier)
        self._named: dict[str, Verifier] = {}

    def of(self, task: Task) -> Verifier:
        """The verifier of a task. DataError when nothing says which."""
        if self._default is not None:
            return self._default
        if task.verifier is None:
            raise DataError(
                f"task {task.id!r} names no verifier and the config sets none: set `verifier`, for example verifier=math"
            )
        if task.verifier not in self._named:
            self._named[task.verifier] = as_verifier(task.verifier)
        return self._named[task.verifier]

    def check(self, tasks: Iterable[Task]) -> None:
        """DataError that names the first tasks which their verifier cannot check, and counts them."""
        bad = [(task, problem) for task in tasks if (problem := self.of(task).check_task(task)) is not None]
        if bad:
            shown = "\n".join(f"  {task.id}: {problem}" for task, problem in bad[:SHOWN])
            raise DataError(f"{len(bad)} tasks cannot be verified; mend or remove them:\n{shown}")

    async def verify(self, rollout: Rollout) -> Rollout:
        """The rollout with its verdict."""
        verifier = self.of(rollout.task)
        verdict = await self.pool.verify(verifier, rollout.task, rollout.text, rollout)
        name = getattr(verifier, "name", type(verifier).__name__)
        rollout.verdicts[name] = verdict
        rollout.timings["verify"] = verdict.seconds
        return rollout
