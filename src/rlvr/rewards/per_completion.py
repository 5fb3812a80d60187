"""A plain function of one completion as a term of the reward."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from rlvr.calling import ByName, sampled_ids
from rlvr.errors import ConfigError
from rlvr.records import Batch

log = logging.getLogger(__name__)


class PerCompletion:
    """A plain reward function over a batch; what it raises or returns as nonsense is undecided, and said once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.call = ByName(function)
        if inspect.iscoroutinefunction(getattr(function, "func", function)):
            raise ConfigError(f"reward {self.call.name!r} is asynchronous: make it a verifier, which may wait")
        self.complained = False

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([self._score(r) for r in batch.rollouts], dtype=np.float64)

    def _score(self, rollout: Any) -> float:
        try:
            value = self.call(rollout.task, rollout.text, sampled_ids(rollout))
            if isinstance(value, (str, bytes)):
                raise TypeError(f"{value!r} is text, not a number")
            return np.nan if value is None else float(value)
        except ConfigError:
            raise
        except Exception as error:  # the user's code: its trouble leaves one rollout undecided, not the run
            if not self.complained:
                log.warning(
                    "reward %r raised %s: %s (said once; such rollouts are undecided)",
                    self.call.name,
                    type(error).__name__,
                    error,
                )
                self.complained = True
            return np.nan
