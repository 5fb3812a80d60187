"""From verified rollouts to the column `reward`, and which of them train: the terms and selectors of the configuration,
with what they declare that they need.

The contracts are `rlvr.components.RewardTerm` and `Selector`. Invariants: no component is known here by name; a look at rewards that
does not train (`peek`) leaves no trace in the memory of a component.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Sequence

import numpy as np

from rlvr import registry
from rlvr.components import RewardTerm, Selector
from rlvr.config import Config
from rlvr.core.component import ComponentList, called_as
from rlvr.data import History
from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.policy.columns import add_statistics
from rlvr.policy.continuations import continuation_logprobs, encoded
from rlvr.records import Batch, Rollout, Task
from rlvr.rewards import Setting, Term, at_step, bind, build_terms, call_plain, components_of, score, walk
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
        self.selectors: list[tuple[str, Selector]] = [
            (spec.name, registry.build("selector", spec)) for spec in config.algorithm.select
        ]
        for name, selector in self.selectors:
            check_order(selector, name, config.algorithm.select_after)
            smallest = selector.smallest_group
            if config.rollout.group_size < smallest:
                raise ConfigError(
                    f"rollout.group_size is {config.rollout.group_size}, and the selector {name!r} compares the members of a "
                    f"group: set rollout.group_size to {smallest} or more, or leave the selector out"
                )

    def bind(self, tasks: Sequence[Task], setting: Setting) -> None:
        """Let the pieces take what they need from the run."""
        setting = dataclasses.replace(setting, tasks=tasks)
        self.terms = bind(self.terms, setting)
        self.selectors = [(name, selector.bind(setting)) for name, selector in self.selectors]

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
        terms = at_step(self.terms, *when)
        if peek:
            terms = [term.each(_untouched) for term in terms]
        terms = [term.each(lambda one: self._given(one, batch, policy)) for term in terms]
        with self._lock:
            return score(batch, terms)

    def call_plain(self, rollouts: Sequence[Rollout]) -> None:
        """Call the plain functions among the terms for those of these rollouts that they have not valued yet."""
        with self._lock:
            call_plain(Batch(list(rollouts)), self.terms)

    def _given(self, term: Term, batch: Batch, policy: Policy) -> Term:
        """The term with the log-probs of what it asks for."""
        if not term.function.asks_continuations:
            return term
        asked = term.function.asks(batch, lambda text: encoded(policy, text))
        found = continuation_logprobs(policy, [(one.context, one.target) for one in asked], self.config.optim)
        scored = list(zip(asked, found, strict=True))
        function = functools.partial(term.function, scored=scored)
        return dataclasses.replace(term, function=called_as(RewardTerm, function))

    def _add_what_is_needed(self, batch: Batch, policy: Policy) -> None:
        functions = [term.function for term in walk(self.terms)]
        needs = frozenset().union(*(function.needs for function in functions))
        if needs:
            add_statistics(policy, batch, needs, [r.sampled for r in batch.rollouts], self.config.optim)
        if any(function.reads_characters for function in functions):
            for rollout in batch.rollouts:
                if rollout.char_ends is None:
                    rollout.char_ends = char_ends(policy.tokenizer, rollout)

    def select(self, batch: Batch, step: int, steps: int) -> Batch:
        """The rollouts of the batch that train. ConfigError names a selector that gives positions which are not there."""
        for name, selector in ComponentList(self.selectors).at(step, steps):
            kept = np.asarray(selector(batch))
            if kept.dtype == bool:
                if kept.shape != (len(batch),):
                    raise ConfigError(f"algorithm.select: {name!r} gave {kept.shape} flags for {len(batch)} rollouts")
                kept = np.flatnonzero(kept)
            if kept.size and (kept.min() < 0 or kept.max() >= len(batch) or len(np.unique(kept)) < len(kept)):
                raise ConfigError(f"algorithm.select: {name!r} gave positions outside of the batch, or one twice")
            batch = batch.select(kept)
        return batch

    @property
    def components(self) -> ComponentList:
        """The terms, each with its weight before its function, then the selectors."""
        return ComponentList([*components_of(self.terms), *self.selectors])


def _untouched(term: Term) -> Term:
    """The term with a copy of a function that has a memory: what the copy notes for it is lost."""
    return dataclasses.replace(term, function=copy.copy(term.function)) if term.function.remembers else term
