"""The pool of tasks of a run, and the samplers that draw from it.

A sampler goes through the pool in epochs; a subclass says in what order. Registered with `register_sampler`; its
options are the parameters of its `__init__`, the run gives it the rest by `bind`.

Invariants: tasks keep their order and their place (a new task goes to the end, a rewritten one stays where it was, none
is removed), so that `pool.at(index)` of a smaller pool means the same in the pool that grew out of it. What is drawn
does not depend on how many are asked for at a time; draws are numbered from 0 for the whole run, so a task drawn twice
makes two groups; tasks added to the pool are drawn from the next epoch on. The state is small: an epoch's order is
computed again from (seed, epoch, pool), and of the pool a checkpoint holds only what differs from the loaded tasks, and
a fingerprint of those.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from rlvr.core.component import CONTRACTS, Component
from rlvr.core.seeding import seed_of
from rlvr.data.history import History
from rlvr.errors import CheckpointError, DataError
from rlvr.records import Task
from rlvr.registry import register


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
        # A dict for its order: added tasks are added again in the same order on resume.
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
        """Make the loaded tasks what they were at the checkpoint; CheckpointError if others were loaded since, unless
        the pool accepts that."""
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
        # Without the place: a data set that was moved or renamed has the same tasks.
        digest.update(json.dumps(task.to_json(), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def _refuse_twice(task_id: str, tasks: Mapping[str, Task]) -> None:
    if task_id in tasks:
        raise DataError(f"the task id {task_id!r} is given twice: make ids unique")


@dataclass(frozen=True)
class Draw:
    """One task drawn: `number` counts the draws of the run from 0 and names the group."""

    number: int
    task: Task


class Sampler(Component):
    """Draws tasks epoch by epoch. Subclass it and write `order`."""

    pool: TaskPool
    seed: int
    history: History
    answer_characters = 0
    """Characters of a task's best answer that it reads from `history[task id].best_answer`; 0: answers are not kept."""

    def bind(self, pool: TaskPool, *, seed: int, history: History | None = None) -> Self:
        """Give the sampler its pool, the run's seed and the per-prompt history. DataError for an empty pool."""
        if not len(pool):
            raise DataError("there are no tasks to draw from")
        self.pool = pool
        self.seed = seed
        self.history = History() if history is None else history
        self.history.keep_answers(self.answer_characters)
        # Of the whole run: a task that is drawn again in another epoch makes a group of its own.
        self._draws = 0
        self._begin(epoch=0)
        return self

    @abstractmethod
    def order(self, epoch: int, size: int) -> Sequence[int] | np.ndarray:
        """The positions (from 0) in the pool to draw in `epoch`, one after the other; at least one.

        `size` is how many tasks the pool held when the epoch began. Must be a function of these, the seed and the
        pool's first `size` tasks; a sampler that uses more (the history, say) saves in its state what it used.
        """

    @property
    def epoch(self) -> int:
        """The epoch of the next draw, from 0."""
        # At the end of an epoch, the next draw begins the next one.
        if self._position < len(self._order):
            return self._epoch
        return self._epoch + 1

    def next(self, count: int) -> list[Draw]:
        """The next `count` (1 or more) draws; past the end of an epoch the next one begins."""
        if count < 1:
            raise ValueError(f"a sampler draws 1 task or more, not {count}")
        return [self._draw() for _ in range(count)]

    def _draw(self) -> Draw:
        # Only when a draw is asked for: tasks added after the last draw of an epoch belong to the next one.
        if self._position == len(self._order):
            self._begin(self._epoch + 1)
        draw = Draw(self._draws, self.pool.at(int(self._order[self._position])))
        self._draws += 1
        self._position += 1
        return draw

    def _begin(self, epoch: int, size: int | None = None) -> None:
        self._epoch = epoch
        self._position = 0
        self._size = len(self.pool) if size is None else size
        self._order = self.order(epoch, self._size)

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws, "epoch": self._epoch, "position": self._position, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken. The sampler must be bound, to the pool as it was then."""
        # The pool grows only; a smaller one is another data set, in which positions mean other tasks.
        if state["size"] > len(self.pool):
            raise CheckpointError(
                f"the sampler was saved with {state['size']} tasks, but the pool now holds {len(self.pool)}; "
                "resume with the data it was made with, or start a new run"
            )
        # The order is computed anew, for the size that the pool had when the epoch began, and the draws go on within
        # it.
        self._begin(state["epoch"], state["size"])
        self._draws = state["draws"]
        self._position = state["position"]


CONTRACTS["sampler"] = (Sampler,)


@register("sampler", "shuffle")
class Shuffle(Sampler):
    """Every task once per epoch, in an order that depends on (seed, epoch) only: the default."""

    def order(self, epoch: int, size: int) -> np.ndarray:
        # No generator is kept: an epoch's order does not depend on how many epochs went before in this process (N7).
        return np.random.default_rng(seed_of(self.seed, "sampler", epoch)).permutation(size)


@register("sampler", "sequential")
class Sequential(Sampler):
    """Every task once per epoch, in the order of the data: for curricula that the data's order makes."""

    def order(self, epoch: int, size: int) -> Sequence[int]:
        return range(size)
