"""Verdicts and other terms -> named reward columns, and their weighted sum.

A term is a function of the batch that returns float64 [B] (NaN where undecided), or a plain function of one completion
(rlvr.calling says what it may ask for). Every term becomes the column `reward/<name>`; the column `reward` is their
weighted sum, undecided where a term is undecided.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.calling import ByName, name_of, sampled_ids
from rlvr.errors import ConfigError
from rlvr.records import Batch
from rlvr.registry import register

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Term:
    """One term of the reward."""

    name: str
    function: Callable[[Batch], np.ndarray]
    weight: float = 1.0


@register("reward", "verdict")
def verdict(batch: Batch) -> np.ndarray:
    """The score of each rollout's verdict; NaN where undecided or missing."""
    scores = [None if r.verdict is None else r.verdict.score for r in batch.rollouts]
    return np.asarray([np.nan if s is None else s for s in scores], dtype=np.float64)


@register("reward", "length")
def length(batch: Batch, *, per: int = 100) -> np.ndarray:
    """Tokens of the completion divided by `per`; give it a negative weight to shorten responses."""
    return np.asarray([r.completion_length / per for r in batch.rollouts], dtype=np.float64)


def build_terms(specs: Sequence[Any]) -> list[Term]:
    """The terms that the configuration's `rewards` writes; each may carry a `weight`, and names must differ."""
    terms = [_term(spec) for spec in specs]
    names = [t.name for t in terms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"rewards: the term {name!r} stands there twice: their columns would have one name")
    return terms


def _without_weight(spec: Any) -> tuple[Any, float]:
    if not isinstance(spec, dict):
        return spec, 1.0
    weight = spec.get("weight", 1.0)
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not np.isfinite(weight):
        raise ConfigError(f"rewards: the weight of {spec.get('name')!r} is {weight!r}, not a number")
    return {k: v for k, v in spec.items() if k != "weight"}, float(weight)


def _term(spec: Any) -> Term:
    if isinstance(spec, Term):
        return spec
    if callable(spec):
        return Term(name_of(spec), _of_batch(spec))
    written, weight = _without_weight(spec)
    name, _ = registry.split(written)
    return Term(name.rpartition(":")[2], _of_batch(registry.build("reward", written)), weight)


def _of_batch(function: Callable[..., Any]) -> Callable[[Batch], np.ndarray]:
    """`function` of the batch as it is; a plain function of one completion applied to each."""
    positional = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
    ]
    if positional[:1] == ["batch"]:
        return function
    return _PerCompletion(function)


class _PerCompletion:
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


def score(batch: Batch, terms: Sequence[Term]) -> Batch:
    """Add the columns `reward/<term>` and their weighted sum `reward` to the batch.

    ConfigError when a term returns something other than one number per rollout.
    """
    total = np.zeros(len(batch))
    for term in terms:
        try:
            values = np.asarray(term.function(batch), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"reward {term.name!r} gave something other than one number per rollout: {error}"
            ) from error
        if values.shape != (len(batch),):
            raise ConfigError(
                f"reward {term.name!r} returned shape {values.shape} for {len(batch)} rollouts: one number each is needed"
            )
        values = np.where(np.isfinite(values), values, np.nan)
        batch.columns[f"reward/{term.name}"] = values
        total = total + term.weight * values
    batch.columns["reward"] = total
    return batch
