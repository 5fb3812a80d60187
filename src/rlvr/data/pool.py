"""The pool of tasks of a run: what samplers draw from.

Invariants: tasks keep their order and their place (a new task goes to the end, a rewritten one stays where it was,
none is removed), so that `pool.at(index)` of a smaller pool means the same in the pool that grew out of it. A
checkpoint holds only what differs from the loaded tasks, and a fingerprint of those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlvr.errors import CheckpointError, DataError
from rlvr.records import Task


class TaskPool:
    """Tasks by id, in order. It may grow or be rewritten during a run. DataError for an id given twice.

    `accept_changed`: a checkpoint that was made with other tasks may be loaded.
    """

    def __init__(self, tasks: Iterable[Task], accept_changed: bool = False) -> None:
        self.accept_changed = accept_changed
        self._loaded: dict[str, Task] = {}
        for task in tasks:
            _refuse_twice(task.id, self._loaded)
            self._loaded[task.id] = task
        self._fingerprint: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._tasks = dict(self._loaded)
        self._ids = list(self._loaded)
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._tasks

    def __getitem__(self, task_id: str) -> Task:
        """The task of that id; KeyError if there is none."""
        if task_id not in self._tasks:
            raise KeyError(f"the pool has no task {task_id!r}")
        return self._tasks[task_id]

    def at(self, index: int) -> Task:
        """The task at a position, from 0, in order of loading and adding."""
        return self._tasks[self._ids[index]]

    def add(self, task: Task) -> None:
        """Append a task; DataError if its id is taken."""
        _refuse_twice(task.id, self._tasks)
        self._ids.append(task.id)
        self._set(task)

    def replace(self, task: Task) -> None:
        """Put a rewritten task in the place of the one of the same id; DataError if there is none."""
        if task.id not in self._tasks:
            raise DataError(f"the pool has no task {task.id!r} to replace: `add` it")
        self._set(task)

    def _set(self, task: Task) -> None:
        self._tasks[task.id] = task
        self._changed[task.id] = None

    @property
    def fingerprint(self) -> str:
        """A hash of the tasks as they were loaded, in order."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self._loaded.values())
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        return {
            "loaded": len(self._loaded),
            "fingerprint": self.fingerprint,
            "changed": [self._tasks[task_id].to_json() for task_id in self._changed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the loaded tasks what they were at the checkpoint; CheckpointError if others were loaded since, unless the
        pool accepts that."""
        if state["fingerprint"] != self.fingerprint and not self.accept_changed:
            raise CheckpointError(
                f"the checkpoint was made with other tasks: {state['loaded']} with the fingerprint "
                f"{state['fingerprint']}, but the data set now holds {len(self._loaded)} with {self.fingerprint}; "
                "resume with the data it was made with, start a new run, or set checkpoint.accept_changed_data=true"
            )
        self._reset()
        for row in state["changed"]:
            task = Task(**row)
            (self.replace if task.id in self._tasks else self.add)(task)


def fingerprint_of(tasks: Iterable[Task]) -> str:
    """A hash of the content of tasks, in order."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(task.to_json(), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def _refuse_twice(task_id: str, tasks: Mapping[str, Task]) -> None:
    if task_id in tasks:
        raise DataError(f"the task id {task_id!r} is given twice: make ids unique")
