"""Samplers: which task is drawn next.

A sampler goes through the pool in epochs; a subclass says in what order. Registered with `register_sampler`; its
options are the parameters of its `__init__`, the run gives it the rest by `bind`.

Invariants: what is drawn does not depend on how many are asked for at a time; draws are numbered from 0 for the whole
run, so a task drawn twice makes two groups; tasks added to the pool are drawn from the next epoch on. The state is a
few numbers: an epoch's order is computed again from (seed, epoch, pool).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from rlvr.core.seeding import seed_of
from rlvr.data.history import History
from rlvr.data.pool import TaskPool
from rlvr.errors import CheckpointError, DataError
from rlvr.records import Task
from rlvr.registry import register


@dataclass(frozen=True)
class Draw:
    """One task drawn: `number` counts the draws of the run from 0 and names the group."""

    number: int
    task: Task


class Sampler(ABC):
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
        return self._epoch if self._position < len(self._order) else self._epoch + 1

    def next(self, count: int) -> list[Draw]:
        """The next `count` (1 or more) draws; past the end of an epoch the next one begins."""
        if count < 1:
            raise ValueError(f"a sampler draws 1 task or more, not {count}")
        return [self._draw() for _ in range(count)]

    def _draw(self) -> Draw:
        if self._position == len(self._order):
            self._begin(self._epoch + 1)
        draw = Draw(self._draws, self.pool.at(int(self._order[self._position])))
        self._draws += 1
        self._position += 1
        return draw

    def _begin(self, epoch: int, size: int | None = None) -> None:
        self._epoch, self._position = epoch, 0
        self._size = len(self.pool) if size is None else size
        self._order = self.order(epoch, self._size)

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws, "epoch": self._epoch, "position": self._position, "size": self._size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken. The sampler must be bound, to the pool as it was then."""
        if state["size"] > len(self.pool):
            raise CheckpointError(
                f"the sampler was saved with {state['size']} tasks, but the pool now holds {len(self.pool)}; "
                "resume with the data it was made with, or start a new run"
            )
        self._begin(state["epoch"], state["size"])
        self._draws, self._position = state["draws"], state["position"]


@register("sampler", "shuffle")
class Shuffle(Sampler):
    """Every task once per epoch, in an order that depends on (seed, epoch) only: the default."""

    def order(self, epoch: int, size: int) -> np.ndarray:
        return np.random.default_rng(seed_of(self.seed, "sampler", epoch)).permutation(size)


@register("sampler", "sequential")
class Sequential(Sampler):
    """Every task once per epoch, in the order of the data: for curricula that the data's order makes."""

    def order(self, epoch: int, size: int) -> Sequence[int]:
        return range(size)
