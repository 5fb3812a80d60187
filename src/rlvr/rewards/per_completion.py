"""A plain function as a term of the reward: of one completion, or in TRL's form of all completions of a group.

Invariant: it is called once per rollout, on rank 0. Its value is kept with the rollout (`Rollout.term_values`), because
dynamic sampling looks at the rewards of a group before the step is scored, every rank scores the step, and a function
may be paid for by the call or be random.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.calling import ByColumns, by_signature, sampled_ids, score_of
from rlvr.errors import USER_CODE_ERRORS, ConfigError, user_traceback
from rlvr.records import Batch, Rollout, Task, cut


class PerCompletion(RewardTerm):
    """The function of the term `name` over a batch. A rollout for which it raises, or returns no number, is undecided
    and counted."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.call = by_signature(function)
        self.name = name
        if inspect.iscoroutinefunction(getattr(function, "func", function)):
            # Scoring is synchronous, so an awaitable would never be awaited; the verifier pool has an event loop.
            raise ConfigError(f"reward {self.call.name!r} is asynchronous: make it a verifier, which may wait")
        self.calls = 0
        """Rollouts that it has scored so far."""
        self.raised = 0
        """Rollouts for which it raised."""
        self.traceback = ""
        """The newest traceback."""

    def missing(self, task: Task) -> str | None:
        """The fields that the function needs and `task` lacks, in words; None when it has all."""
        return self.call.missing(task)

    def __call__(self, batch: Batch) -> np.ndarray:
        """Compute float64 [B], NaN where undecided. Rollouts that have a value of this term keep it."""
        unscored = [rollout for rollout in batch.rollouts if self.name not in rollout.term_values]
        if isinstance(self.call, ByColumns):
            for group in Batch(unscored).groups():
                self._score(group.rollouts)
        else:
            for rollout in unscored:
                self._score([rollout])
        return np.asarray([rollout.term_values[self.name] for rollout in batch.rollouts], dtype=np.float64)

    def _called(self, rollouts: Sequence[Rollout]) -> Any:
        task = rollouts[0].task
        ids = [sampled_ids(rollout) for rollout in rollouts]
        if isinstance(self.call, ByColumns):
            return self.call(task, [rollout.text for rollout in rollouts], ids)
        return [self.call(task, rollouts[0].text, ids[0])]

    def _score(self, rollouts: Sequence[Rollout]) -> None:
        """Note the values of a rollout or of a group's, NaN for all of them where the function fails."""
        self.calls += len(rollouts)
        try:
            values = self._called(rollouts)
            # A text has a length too: "10" for two rollouts would be taken for two values.
            if isinstance(values, (str, bytes)) or len(values) != len(rollouts):
                raise TypeError(f"{values!r} is not a list of {len(rollouts)} numbers")
            numbers = [_number(value) for value in values]
        # The library's own: a wrong setting ends the run, it is no failure of one completion.
        except ConfigError:
            raise
        # The user's code may raise anything; it leaves these rollouts undecided and the run going on.
        except USER_CODE_ERRORS as error:
            self.raised += len(rollouts)
            self.traceback = cut(user_traceback(error))
            numbers = [np.nan] * len(rollouts)
        for rollout, value in zip(rollouts, numbers, strict=True):
            rollout.term_values[self.name] = value


def _number(value: Any) -> float:
    value = score_of(value)
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{value!r} is text, not a number")
    return np.nan if value is None else float(value)
