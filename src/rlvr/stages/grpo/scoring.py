"""From verified rollouts to the columns `reward` and `advantage`: the reward terms, the selectors, the advantage
estimator and its modifiers that the configuration names, with the statistics that they need.

The contracts are `rlvr.components.RewardTerm`, `Selector`, `Advantage` and `Modifier`. Invariants: no component is
known here by name; a look at rewards that does not train (`peek`) leaves no trace in the memory of a component.

`chooser` evaluates a reward term without any stage of training, as the scorer of best-of-k evaluation.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.components import Advantage, AdvantageComponent, Continuation, Monitoring, RewardTerm, Selector
from rlvr.config import AlgorithmConfig, Config, OptimConfig
from rlvr.core.component import called_as
from rlvr.core.needs import Need
from rlvr.core.schedules import ComponentList
from rlvr.data import History
from rlvr.errors import ConfigError
from rlvr.policy import Policy, Snapshot
from rlvr.policy.statistics import add_statistics, continuation_logprobs, encoded
from rlvr.records import Batch, Rollout, Task
from rlvr.rewards import (
    RewardContext,
    Term,
    at_step,
    bind,
    build_terms,
    call_plain,
    check,
    components_of,
    score,
    show_monitored,
    walk,
)
from rlvr.rollout.characters import char_ends
from rlvr.selection.member_selectors import check_order
from rlvr.stages.grpo.build_objective import build_penalty, check_group_size
from rlvr.stages.grpo.reference_penalty import less_penalty


class Reads:
    """Inputs of some components beside the columns of the batch: statistics of the policy, `Rollout.char_ends` and
    log-probs of continuations. Asked for once and not at every step."""

    def __init__(self, components: Iterable[RewardTerm | AdvantageComponent]) -> None:
        components = list(components)
        self.needs: frozenset[Need] = frozenset().union(*(component.needs for component in components))
        self.characters = any(component.reads_characters for component in components)
        self.continuations = any(isinstance(one, RewardTerm) and one.asks_continuations for one in components)

    def add(self, batch: Batch, policy: Policy, on: np.ndarray, scored: Iterable[Rollout], optim: OptimConfig) -> None:
        """Add the statistics at the sampled tokens of the rollouts that are `on`, bool [B], and the character ends of
        the rollouts that are `scored` by characters."""
        # A reward may have brought some of them for an advantage.
        if needs := {need for need in self.needs if f"{need.statistic}/current" not in batch.token_columns}:
            where = [r.sampled & is_on for r, is_on in zip(batch.rollouts, on, strict=True)]
            add_statistics(policy, batch, needs, where, optim)
        if self.characters:
            for rollout in scored:
                if rollout.char_ends is None:
                    rollout.char_ends = char_ends(policy.tokenizer, rollout)


class Scoring:
    """The reward terms and the selectors that the configuration names. ConfigError where they contradict the rest of
    it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.terms = build_terms(config.rewards)
        check(self.terms, config)
        self._reads = Reads(term.function for term in walk(self.terms))
        self._lock = threading.Lock()
        """Held while rewards are computed: with dynamic sampling and staleness the draws of later steps are looked at
        on another thread while a step is scored, and reward functions need not be safe to call from two threads at
        once."""
        self.selectors: list[tuple[str, Selector]] = [
            (spec.name, registry.build("selector", spec)) for spec in config.algorithm.select
        ]
        for name, selector in self.selectors:
            check_order(selector, name, config.algorithm.select_after)
            otherwise = ", or leave the selector out"
            check_group_size(config.rollout.group_size, selector, f"the selector {name!r}", otherwise)

    def bind(self, tasks: Sequence[Task], setting: RewardContext) -> None:
        """Let the components take what they need from the run."""
        setting = dataclasses.replace(setting, tasks=tasks)
        self.terms = bind(self.terms, setting)
        self._reads = Reads(term.function for term in walk(self.terms))
        self.selectors = [(name, self._bound(name, selector, setting)) for name, selector in self.selectors]

    @staticmethod
    def _bound(name: str, selector: Selector, setting: RewardContext) -> Selector:
        bound: Any = selector.bind(setting)
        if not isinstance(bound, Selector):
            raise ConfigError(f"algorithm.select: `bind` of {name!r} returned {bound!r}: it has to return the selector")
        return bound

    def score(
        self,
        rollouts: Sequence[Rollout],
        policy: Policy,
        history: History,
        when: tuple[int, int],
        peek: bool = False,
        reference: Snapshot | None = None,
    ) -> Batch:
        """The batch of these rollouts with its reward columns, and `history/mean`, the mean score of the task's earlier
        draws (NaN where there is none), at step `when[0]` of `when[1]`."""
        batch = Batch(list(rollouts))
        terms = self._prepared(batch, policy, history, when, peek, reference)
        with self._lock:
            return score(batch, terms)

    def add_shared_statistics(self, batch: Batch, policy: Policy, needs: frozenset[Need]) -> None:
        """Add to a batch whose rewards are known the statistics that scoring it would bring, where `needs` of the
        advantages share one: all of them, so that advantages are those of a batch that was scored, to the last bit."""
        if {need.statistic for need in needs} & {need.statistic for need in self._reads.needs}:
            self._add_what_is_needed(batch, policy)

    def show_monitored(
        self,
        rollouts: Sequence[Rollout],
        monitoring: Monitoring,
        policy: Policy,
        history: History,
        when: tuple[int, int],
        reference: Snapshot | None = None,
    ) -> None:
        """Show responses that are not trained to the terms that asked for them."""
        batch = Batch(list(rollouts))
        terms = self._prepared(batch, policy, history, when, reference=reference)
        with self._lock:
            show_monitored(batch, terms, monitoring)

    @property
    def monitorings(self) -> list[Monitoring]:
        """The different monitorings that terms ask for."""
        asked = (term.function.monitoring for term in walk(self.terms))
        return list(dict.fromkeys(monitoring for monitoring in asked if monitoring is not None))

    def _prepared(
        self,
        batch: Batch,
        policy: Policy,
        history: History,
        when: tuple[int, int],
        peek: bool = False,
        reference: Snapshot | None = None,
    ) -> list[Term]:
        """The terms as they are called for a batch, to which the columns that they read are added."""
        # Before this step is noted in the history, so that a rollout is not compared with itself.
        rates = [history[r.task.id].pass_rate for r in batch.rollouts]
        batch.columns["history/mean"] = np.asarray(
            [np.nan if rate is None else rate for rate in rates], dtype=np.float64
        )
        self._add_what_is_needed(batch, policy)
        # Scheduled weights become numbers; the terms with schedules stay in self.terms.
        terms = at_step(self.terms, *when)
        if peek:
            terms = [term.each(_untouched) for term in terms]
        if self._reads.continuations:
            terms = [term.each(lambda one: self._given(one, batch, policy, reference)) for term in terms]
        return terms

    def call_plain(self, rollouts: Sequence[Rollout]) -> None:
        """Call the plain functions among the terms for those of these rollouts that they have not valued yet."""
        with self._lock:
            call_plain(Batch(list(rollouts)), self.terms)

    def _given(self, term: Term, batch: Batch, policy: Policy, reference: Snapshot | None) -> Term:
        """The term with the log-probs of the continuations that it asks for."""
        if not term.function.asks_continuations:
            return term
        requests = term.function.asks(batch, lambda text: encoded(policy, text))
        own = [one for one in requests if one.model == "current"]
        others = [one for one in requests if one.model == "reference"]
        scored = self._scored(own, policy)
        if others:
            assert reference is not None, f"the term {term.name!r} asks for the reference and has no `needs_reference`"
            with reference.in_place():
                scored += self._scored(others, policy)
        function = functools.partial(term.function, scored=scored)
        return dataclasses.replace(term, function=called_as(RewardTerm, function))

    def _scored(self, requests: Sequence[Continuation], policy: Policy) -> list[tuple[Continuation, np.ndarray]]:
        """The requests with their log-probs under the weights that are in place."""
        logprobs = continuation_logprobs(policy, [(one.context, one.target) for one in requests], self.config.optim)
        return list(zip(requests, logprobs, strict=True))

    @property
    def needs_reference(self) -> bool:
        """Return True if a term has continuations scored by the reference."""
        return any(term.function.needs_reference for term in walk(self.terms))

    def _add_what_is_needed(self, batch: Batch, policy: Policy) -> None:
        everyone = np.ones(len(batch), dtype=bool)
        self._reads.add(batch, policy, everyone, batch.rollouts, self.config.optim)

    def show_sampled(self, batch: Batch) -> None:
        """Show all that was sampled for a step to the selectors."""
        for _, selector in self.selectors:
            selector.sampled(batch)

    def select(self, batch: Batch, step: int, steps: int, peek: bool = False) -> Batch:
        """The rollouts of the batch that train; `peek`: without a trace in the memory of a selector. ConfigError names
        a selector that gives positions which are not there."""
        for name, selector in ComponentList(self.selectors).at(step, steps):
            if peek:
                selector = copy.copy(selector)
            kept = np.asarray(selector(batch))
            # A selector may return a flag for each rollout instead of positions.
            if kept.dtype == bool:
                if kept.shape != (len(batch),):
                    raise ConfigError(f"algorithm.select: {name!r} gave {kept.shape} flags for {len(batch)} rollouts")
                kept = np.flatnonzero(kept)
            # A negative position would count from the end, and a rollout twice would be trained twice.
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
    if term.function.remembers:
        # Shallow: what the copy assigns to its own attributes is lost, a state that it changes in place is not.
        return dataclasses.replace(term, function=copy.copy(term.function))
    return term


class Advantages:
    """The estimator and the modifiers that the configuration names. ConfigError where they contradict the rest of
    it."""

    def __init__(self, config: Config, tasks: Sequence[Task] | None) -> None:
        """`tasks` None: they are not read yet, and the components are not asked about them."""
        algorithm = config.algorithm
        self.config = config
        self.name = algorithm.advantage.name
        estimator: Advantage = registry.build("advantage", algorithm.advantage)
        self.makes = estimator.makes
        self._named: list[tuple[str, AdvantageComponent]] = [(self.name, estimator)]
        self._named += [(spec.name, registry.build("modifier", spec)) for spec in algorithm.modifiers]
        self.components = ComponentList(self._named)
        self._reads = Reads(component for _, component in self._named)
        self._read_spans = [name for name, component in self._named if component.reads_verdict_spans]
        """Names of those that read spans of verdicts."""
        otherwise = ", or choose an advantage that needs no group (group with baseline and scale none, say)"
        check_group_size(config.rollout.group_size, estimator, f"the advantage {self.name!r}", otherwise)
        self._penalised = (penalty := build_penalty(algorithm)) is not None and penalty.where == "advantage"
        self.loss = algorithm.loss.name
        self._loss_per_response = registry.build("loss", algorithm.loss).per_response
        self._refuse_tokens_where_one_number_is_needed()
        if tasks is None:
            return
        for _, component in self._named:
            component.check(config, tasks)

    def check_spans(self, context: RewardContext) -> None:
        """ConfigError where a component reads spans of verdicts, and no verifier of the tasks gives any."""
        for name in self._read_spans:
            context.check_spans(f"algorithm: {name!r}")

    @property
    def needs(self) -> frozenset[Need]:
        """Statistics of the policy before the update that the estimator and the modifiers read."""
        return self._reads.needs

    def _refuse_tokens_where_one_number_is_needed(self) -> None:
        by_token = "kl.where: advantage" if self._penalised else None
        for name, component in self._named:
            if by_token is not None and component.per_response:
                raise ConfigError(
                    f"algorithm.modifiers: {name!r} needs one advantage per response, and {by_token!r} before it "
                    f"gives one per token: put {name!r} first or leave one of them out"
                )
            # Once an advantage is per token every later modifier sees one per token.
            by_token = name if component.per_token else by_token
        if by_token is not None and self._loss_per_response:
            raise ConfigError(self._credit_is_lost(by_token))

    def _credit_is_lost(self, by_token: str) -> str:
        """Say that the loss would make one number of the advantages per token that `by_token` gives."""
        return (
            f"algorithm.loss {self.loss!r} takes one number per response here (ratio geometric or sequence, gmpo, "
            f"losses of whole responses), and {by_token!r} gives an advantage per token, of which only the mean would "
            "count: set algorithm.preset=gspo_token (loss.ratio geometric_token), loss.ratio=token, or an advantage "
            "per response"
        )

    def add(self, batch: Batch, policy: Policy, step: int, steps: int) -> None:
        """The column `advantage`, or the token column where a component gives one array per rollout.

        ConfigError names a component whose result has another shape, or no number for a decided rollout.
        """
        decided = np.isfinite(batch.column("reward"))
        with_spans = [r.verdict is not None and bool(r.verdict.spans) for r in batch.rollouts]
        if self._read_spans:
            batch.columns["no_spans"] = np.where(decided, 1.0 - np.asarray(with_spans, dtype=np.float64), np.nan)
        scored = [rollout for rollout, has_spans in zip(batch.rollouts, with_spans, strict=True) if has_spans]
        self._reads.add(batch, policy, decided, scored, self.config.optim)
        # The penalty comes after the estimator, whose baseline is of rewards, and before modifiers, which may normalise
        # both.
        (name, estimator), *modifiers = self.components.at(step, steps)
        values = self._checked(estimator(batch), batch, f"algorithm.advantage {name!r}")
        if absent := [column for column in self.makes if not batch.has(column)]:
            raise ConfigError(
                f"algorithm.advantage {name!r} says that it makes {absent[0]!r}, and added no such column"
            )
        if self._penalised:
            values = less_penalty(values, batch)
        for name, modifier in modifiers:
            values = self._checked(modifier(batch, values), batch, f"algorithm.modifiers: {name!r}")
        if isinstance(values, list):
            if self._loss_per_response:  # a component that does not declare `per_token`
                raise ConfigError(self._credit_is_lost(" or ".join(name for name, _ in self._named)))
            batch.token_columns["advantage"] = values
        else:
            batch.columns["advantage"] = values

    @staticmethod
    def _checked(values: Any, batch: Batch, component: str) -> np.ndarray | list[np.ndarray]:
        if isinstance(values, list):
            columns = [np.asarray(v, dtype=np.float64) for v in values]
            fits = [v.shape for v in columns] == [(len(r),) for r in batch.rollouts]
        else:
            columns = [np.asarray(values, dtype=np.float64)]
            fits = columns[0].shape == (len(batch),)
        if not fits:
            raise ConfigError(
                f"{component} returned shapes {[v.shape for v in columns][:4]} for {len(batch)} rollouts: "
                "an array of one number per rollout is needed, or a list of one array per rollout with a number per "
                "token"
            )
        # One NaN in an advantage makes the loss of the whole optimizer step NaN.
        if any(not np.isfinite(v).all() for v in columns):
            raise ConfigError(f"{component} returned a NaN or an infinity: undecided rollouts get 0")
        if isinstance(values, list):
            return columns
        return columns[0]


Scorer = Callable[[Sequence[Rollout]], np.ndarray]
"""Rollouts -> one score each, NaN where it is undecided."""


def chooser(config: Config, policy: Policy, tasks: Sequence[Task], apart: bool = False) -> Scorer | None:
    """The scorer that `config.evaluation.scorer` names, if it names one.

    `apart` says that the policy's weights lie in parts on several ranks: ConfigError then for a term that needs a
    forward pass, which only rank 0 would take.
    """
    scorer = config.evaluation.scorer
    if scorer is None:
        return None
    # The default algorithm: selectors and modifiers of the run must not be built, or refused, for an evaluation.
    alone = config.model_copy(update={"rewards": [scorer], "algorithm": AlgorithmConfig()})
    scoring = Scoring(alone)
    scoring.bind(tasks, RewardContext(alone, tasks))
    if scoring.needs_reference:
        raise ConfigError(
            f"evaluation.scorer: {scorer.written!r} compares with the policy at the start of a stage, which an "
            "evaluation does not keep: choose another scorer"
        )
    if apart and any(term.function.needs_policy for term in walk(scoring.terms)):
        raise ConfigError(
            f"evaluation.scorer: {scorer.written!r} needs a forward pass of the policy, whose weights lie in "
            "parts on the ranks: evaluate a checkpoint with python -m rlvr.evaluate, or choose another scorer"
        )
    # No history, and a peek: an evaluation leaves no trace in the memory of a reward.
    return lambda rollouts: scoring.score(rollouts, policy, History(), (0, 1), peek=True).column("reward")
