"""Which verifier checks which task: the configured one, or the one that the task names.

Invariant: every task has a verifier and a verifier accepts every task before training starts, or the run is refused with
the task's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from rlvr.errors import ConfigError, DataError
from rlvr.records import BASELINE, Rollout, Task, Verdict
from rlvr.verifiers.base import Verifier, as_verifier, display_name
from rlvr.verifiers.pool import VerifierPool
from rlvr.verifiers.pool.sandbox import missing as missing_sandbox

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
                f"{task.named} names no verifier and the config sets none: set `verifier`, for example verifier=math"
            )
        if task.verifier not in self._named:
            self._named[task.verifier] = as_verifier(task.verifier)
        return self._named[task.verifier]

    def check(self, tasks: Iterable[Task]) -> None:
        """DataError that names the first tasks which their verifier cannot check, and counts them; ConfigError where a
        verifier needs a sandbox and there can be none."""
        tasks = list(tasks)
        if any(self.of(task).needs.sandbox for task in tasks) and (problem := missing_sandbox()) is not None:
            raise ConfigError(problem)
        bad = [(task, problem) for task in tasks if (problem := self.of(task).check_task(task)) is not None]
        if bad:
            shown = "\n".join(
                f"  {task.id}: {problem}{f' ({task.place})' if task.place else ''}" for task, problem in bad[:SHOWN]
            )
            raise DataError(f"{len(bad)} tasks cannot be verified; mend or remove them:\n{shown}")

    def by_group(self, task: Task) -> bool:
        """Whether the verifier of a task wants the rollouts of a group together."""
        return self.of(task).verify_group is not None

    def same_answer(self, task: Task, first: str, second: str) -> bool:
        """Whether two extracted answers to a task are the same, as its verifier sees it."""
        return self.of(task).judge_of(task).same_answer(first, second)

    async def verify(self, rollout: Rollout) -> Rollout:
        """The rollout with its verdict."""
        verifier = self.of(rollout.task)
        return _put(rollout, verifier, await self.pool.verify(verifier, rollout.task, rollout.text, rollout))

    async def verify_group(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Rollouts of one task with their verdicts, given in one call where the verifier wants them together."""
        if not rollouts:
            return []
        task = rollouts[0].task
        verifier = self.of(task)
        verdicts = await self.pool.verify_group(verifier, task, [rollout.text for rollout in rollouts], rollouts)
        return [_put(rollout, verifier, verdict) for rollout, verdict in zip(rollouts, verdicts, strict=True)]


def _put(rollout: Rollout, verifier: Verifier, verdict: Verdict) -> Rollout:
    rollout.verdicts[display_name(verifier)] = verdict
    rollout.timings["verify"] = verdict.seconds
    return rollout


async def verify_again(
    rollouts: Sequence[Rollout],
    by_group: Callable[[Task], bool],
    verify_group: Callable[[Sequence[Rollout]], Awaitable[Sequence[Rollout]]],
) -> None:
    """Put new verdicts in the place of those that rollouts have, group by group where their verifier wants that.

    What others are compared with is judged alone.
    """
    groups: dict[str, list[Rollout]] = {}
    for number, rollout in enumerate(rollouts):
        rollout.verdicts.clear()
        together = rollout.role != BASELINE and by_group(rollout.task)
        groups.setdefault(f"group {rollout.group}" if together else str(number), []).append(rollout)
    await asyncio.gather(*(verify_group(members) for members in groups.values()))
