"""From verified rollouts to the column `reward`, and which of them train: the terms and selectors of the configuration,
with what they declare that they need.

What a term may declare is listed in rlvr.rewards.terms, what a selector may in rlvr.selection. Invariants: no piece is
known here by name; a look at rewards that does not train (`peek`) leaves no trace in the memory of a piece.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.config import Config
from rlvr.core.schedules import Controller, at, controllers, moving_options
from rlvr.data import History
from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.policy.columns import add_statistics
from rlvr.policy.continuations import continuation_logprobs, encoded
from rlvr.records import Batch, Rollout, Task
from rlvr.rewards import Setting, Term, at_step, bind, build_terms, call_plain, controllers_of, score, walk
from rlvr.rewards import scheduled as scheduled_terms
from rlvr.rollout.characters import char_ends
from rlvr.selection.members import check_order


class Scoring:
    """The reward terms and the selectors that the configuration names. ConfigError where they contradict the rest of it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.terms = build_terms(config.rewards)
        self._lock = threading.Lock()
        """Held while rewards are computed: with dynamic sampling and staleness the draws of later steps are looked at on another
        thread while a step is scored, and reward functions need not be safe to call from two threads at once."""
        self.names = [spec.name for spec in config.algorithm.select]
        self.selectors = [registry.build("selector", spec) for spec in config.algorithm.select]
        for selector, name in zip(self.selectors, self.names, strict=True):
            check_order(selector, name, config.algorithm.select_after)
            smallest = getattr(selector, "smallest_group", 1)
            if config.rollout.group_size < smallest:
                raise ConfigError(
                    f"rollout.group_size is {config.rollout.group_size}, and the selector {name!r} compares the members of a "
                    f"group: set rollout.group_size to {smallest} or more, or leave the selector out"
                )

    def bind(self, tasks: Sequence[Task], setting: Setting) -> None:
        """Let the pieces take what they need from the run."""
        setting = dataclasses.replace(setting, tasks=tasks)
        self.terms = bind(self.terms, setting)
        self.selectors = [s.bind(setting) if hasattr(s, "bind") else s for s in self.selectors]

    def score(
        self,
        rollouts: Sequence[Rollout],
        policy: Policy,
        history: History,
        when: tuple[int, int],
        peek: bool = False,
        known: dict[str, np.ndarray] | None = None,
    ) -> Batch:
        """The batch of these rollouts with its reward columns, and `history/mean`, the mean score of the task's earlier draws
        (NaN where there is none), at step `when[0]` of `when[1]`. Columns that are `known` are taken as they are."""
        batch = Batch(list(rollouts), dict(known or {}))
        if known is not None:
            self._add_what_is_needed(batch, policy)
            return batch
        rates = [history[r.task.id].pass_rate for r in rollouts]
        batch.columns["history/mean"] = np.asarray(
            [np.nan if rate is None else rate for rate in rates], dtype=np.float64
        )
        self._add_what_is_needed(batch, policy)
        terms = [term.each(lambda one: self._given(one, batch, policy)) for term in at_step(self.terms, *when)]
        with self._lock:
            return score(batch, [term.each(_untouched) for term in terms] if peek else terms)

    def call_plain(self, rollouts: Sequence[Rollout]) -> None:
        """Call the plain functions among the terms for those of these rollouts that they have not valued yet."""
        with self._lock:
            call_plain(Batch(list(rollouts)), self.terms)

    def _given(self, term: Term, batch: Batch, policy: Policy) -> Term:
        """The term with the log-probs of what it asks for."""
        if not hasattr(term.function, "asks"):
            return term
        asked = term.function.asks(batch, lambda text: encoded(policy, text))
        found = continuation_logprobs(policy, [(one.context, one.target) for one in asked], self.config.optim)
        scored = list(zip(asked, found, strict=True))
        return dataclasses.replace(term, function=functools.partial(term.function, scored=scored))

    def _add_what_is_needed(self, batch: Batch, policy: Policy) -> None:
        pieces = [term.function for term in walk(self.terms)]
        needs = frozenset().union(*(getattr(piece, "needs", ()) for piece in pieces))
        if needs:
            add_statistics(policy, batch, needs, [r.sampled for r in batch.rollouts], self.config.optim)
        if any(getattr(piece, "reads_characters", False) for piece in pieces):
            for rollout in batch.rollouts:
                if rollout.char_ends is None:
                    rollout.char_ends = char_ends(policy.tokenizer, rollout)

    def select(self, batch: Batch, step: int, steps: int) -> Batch:
        """The rollouts of the batch that train. ConfigError names a selector that gives positions which are not there."""
        for selector, name in zip(self.selectors, self.names, strict=True):
            kept = np.asarray(at(selector, step, steps)(batch))
            if kept.dtype == bool:
                if kept.shape != (len(batch),):
                    raise ConfigError(f"algorithm.select: {name!r} gave {kept.shape} flags for {len(batch)} rollouts")
                kept = np.flatnonzero(kept)
            if kept.size and (kept.min() < 0 or kept.max() >= len(batch) or len(np.unique(kept)) < len(kept)):
                raise ConfigError(f"algorithm.select: {name!r} gave positions outside of the batch, or one twice")
            batch = batch.select(kept)
        return batch

    def controllers(self) -> Iterator[Controller]:
        """The controllers of the terms, then those of the selectors."""
        yield from controllers_of(self.terms)
        yield from controllers(*self.selectors)

    def scheduled(self, step: int, steps: int) -> dict[str, float]:
        """The weights and options that are no constants, by `schedule/reward/TERM.OPTION` and `schedule/SELECTOR.OPTION`."""
        moving = scheduled_terms(self.terms, step, steps)
        for name, selector in zip(self.names, self.selectors, strict=True):
            moving |= moving_options(selector, f"schedule/{name}", step, steps)
        return moving

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """A step was trained: pieces with a memory take it in."""
        for piece in self._pieces():
            if hasattr(piece, "observe"):
                piece.observe(metrics)

    def state_dict(self) -> list[Any]:
        """What the pieces remember, None for those without a memory."""
        return [piece.state_dict() if hasattr(piece, "state_dict") else None for piece in self._pieces()]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Go on with what the pieces remembered."""
        for piece, saved in zip(self._pieces(), state, strict=True):
            if saved is not None:
                piece.load_state_dict(saved)

    def _pieces(self) -> list[Any]:
        return [*(term.function for term in walk(self.terms)), *self.selectors]


def _untouched(term: Term) -> Term:
    """The term with a copy of a piece that has a memory: what the copy notes for it is lost."""
    remembers = hasattr(term.function, "observe")
    return dataclasses.replace(term, function=copy.copy(term.function)) if remembers else term
