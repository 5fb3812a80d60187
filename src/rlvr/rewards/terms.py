"""The terms of a reward: how they are written, built, evaluated and summed; and the simplest one: the verdict and its
named scores.

A term is a function of the batch that returns float64 [B] (NaN where undecided) or scores of parts of the responses
(rlvr.core.span_rewards), or a plain function of one completion or, in TRL's form, of a group's completions
(rlvr.core.calling says what it may ask for). A plain function is called once per rollout. A function of the batch is
called once per step with all rollouts of the step, and under dynamic sampling (`rollout.dynamic_sampling`) before that
with those of each draw by itself, to see whether the draw's rewards differ. Every term becomes the column
`reward/<name>`; the column `reward` is their weighted sum, undecided where a term is undecided whose weight is not 0 at
the step. Scores of parts are kept with the rollouts (`Rollout.spans`), where the advantage `spans` finds them.

A term may be made of others: its class names the options that hold terms (`inner = ("term", "by")`), and it is called
with their values, `term(batch, term=[B], by=[B])` (a list of arrays where the option holds a list). So a term sees
the whole batch, its groups, and any other term. It may also declare, all optional: `needs` (statistics of
the policy, found in the token columns `STATISTIC/current`), `asks` (rlvr.rewards.likelihood), `reads_characters` (it
reads `Rollout.char_ends`), `bind(setting) -> term` (what it takes from the run, and ConfigError where it contradicts
it), and for a term with a state `observe(metrics)`, which is called once per trained step with all metrics (the mean
of a term is `reward/<name>`), `monitoring` and `monitored` (responses that are not trained), `state_dict` and
`load_state_dict`. Options that are Scalars may be schedules or follow a
metric; a term with a state takes none.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator

from rlvr import registry
from rlvr.components import Monitoring, RewardContext, RewardTerm
from rlvr.config import Config, RewardSpec
from rlvr.core.calling import name_of
from rlvr.core.component import called_as
from rlvr.core.schedules import Scalar, at, scalar_value
from rlvr.core.span_rewards import SpanRewards
from rlvr.errors import USER_CODE_ERRORS, ConfigError, RlvrError, UserCodeError, nearest, user_traceback
from rlvr.records import Batch, Task, cut
from rlvr.registry import register
from rlvr.rewards.per_completion import PerCompletion
from rlvr.rewards.span_values import TermValues, noted, on_spans

log = logging.getLogger(__name__)


def _checked_spec(spec: Any) -> Any:
    try:
        registry.check_options("reward", RewardSpec.parse(spec))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return spec


TermSpec = Annotated[Any, AfterValidator(_checked_spec)]
"""The type of an option that holds a term as written."""

SHOWN = 3
"""Tasks that an error names."""


@dataclass(frozen=True)
class Term:
    """One term of the reward."""

    name: str
    function: RewardTerm
    weight: Scalar = 1.0
    sources: tuple[str, ...] | None = None
    """The sources of tasks that have the term; None: all."""
    inner: Mapping[str, Any] = field(default_factory=dict)
    """Option -> the term, or the list of terms, that it holds."""
    written: tuple[str, Mapping[str, Any]] | None = field(default=None, compare=False, repr=False)
    """The name and the options in the configuration; None of a function that was given in Python."""
    warned: set[str] = field(default_factory=set, compare=False, repr=False)
    """The reported failures of a term of weight 0, each once in a run: copies of the term share the set."""

    def parts(self) -> list[Term]:
        """The terms that it is made of."""
        return [term for held in self.inner.values() for term in (held if isinstance(held, list) else [held])]

    def each(self, change: Callable[[Term], Term]) -> Term:
        """The term with `change` made to it and to all that it is made of."""
        held = {
            k: [t.each(change) for t in v] if isinstance(v, list) else v.each(change) for k, v in self.inner.items()
        }
        return change(dataclasses.replace(self, inner=held))


def walk(terms: Sequence[Term]) -> Iterator[Term]:
    """All terms and their inner terms, depth first."""
    for term in terms:
        yield term
        yield from walk(term.parts())


def paid(terms: Sequence[Term]) -> Iterator[Term]:
    """The terms that may pay, with those that they are made of. A scheduled weight is an object, which is not 0."""
    for term in terms:
        # A schedule is an object and differs from 0, although it may be 0 at some step.
        if term.weight != 0:
            yield term
            yield from paid(term.parts())


def plain_functions(terms: Iterable[Term]) -> list[tuple[str, PerCompletion]]:
    """The plain functions among these terms, by the term's name."""
    return [(term.name, term.function) for term in terms if isinstance(term.function, PerCompletion)]


# from the configuration


def build_terms(specs: Sequence[Any]) -> list[Term]:
    """The terms that the configuration's `rewards` writes.

    Each may carry a `weight`, a name for its column (`as`) and the `sources` of tasks that have it. Names must differ,
    except that a term may stand in several places when it is written the same.
    """
    terms = [_term(spec) for spec in specs]
    names = [t.name for t in terms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"rewards: the term {name!r} stands there twice: their columns would have one name; give one another "
                "name with `as`"
            )
    written: dict[str, Any] = {}
    for term in walk(terms):
        # The same term in two places (the verdict in a sum and in a gate) is one column; two different ones need two
        # names. Functions and Terms from Python are not written.
        if term.written is not None and written.setdefault(term.name, term.written) != term.written:
            raise ConfigError(
                f"rewards: two different terms are called {term.name!r}, and their columns would have one name: give "
                "one another name with `as`"
            )
    return terms


def _term(written: Any, top: bool = True) -> Term:
    if isinstance(written, Term):
        return written
    if callable(written):
        return Term(name_of(written), _of_batch(written, name_of(written)))
    spec = RewardSpec.parse(written)
    name = spec.column
    if "sources" in spec.extra and not top:
        raise ConfigError(f"rewards: {name!r} has `sources` and stands inside another term: give them to the outer one")
    component = registry.build("reward", spec)
    inner: dict[str, Any] = {}
    for option in component.inner if isinstance(component, RewardTerm) else ():
        held = getattr(component, option)
        if held is not None:
            if isinstance(held, tuple):
                inner[option] = [_term(one, False) for one in held]
            else:
                inner[option] = _term(held, False)
    written = (spec.name, spec.options)
    return Term(name, _of_batch(component, name), spec.weight, spec.sources, inner, written)


def _of_batch(function: Callable[..., Any], name: str) -> RewardTerm:
    """Return a function of the batch, or a plain function of completions, as the function of the term `name`."""
    positional = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
    ]
    # The name of the first parameter decides: `batch` is a function of the batch, anything else a plain function of a
    # completion.
    if positional[:1] != ["batch"]:
        return PerCompletion(function, name)
    term: RewardTerm = called_as(RewardTerm, function)
    return term


def bind(terms: Sequence[Term], setting: RewardContext) -> list[Term]:
    """The terms with what they take from the run; ConfigError names what contradicts it."""

    def bound(term: Term) -> Term:
        # A class of the user's may forget the `return`.
        function: Any = term.function.bind(setting)
        if not isinstance(function, RewardTerm):
            raise ConfigError(f"rewards: `bind` of {term.name!r} returned {function!r}: it has to return the term")
        return dataclasses.replace(term, function=function)

    _check_sources(terms, setting)
    _check_fields(terms, setting.tasks)
    return [term.each(bound) for term in terms]


def check(terms: Sequence[Term], config: Config) -> None:
    """ConfigError names the term that the rest of the configuration contradicts, whatever the tasks are."""
    for term in walk(terms):
        try:
            term.function.check_config(config)
        except ConfigError as error:
            if term.name in str(error):
                raise
            raise ConfigError(f"rewards: {term.name!r}: {error}") from error
        except USER_CODE_ERRORS as error:
            raise ConfigError(
                f"rewards: `check_config` of {term.name!r} failed. What it raised:\n{user_traceback(error)}"
            ) from error
    needing = [t.name for t in walk(terms) if t.function.needs_policy]
    dynamic = config.rollout.dynamic_sampling
    if needing and dynamic is not None and dynamic.by == "rewards":
        raise ConfigError(
            f"rewards: {needing[0]!r} needs a forward pass of the policy over whole steps, and "
            "rollout.dynamic_sampling looks at rewards while responses are still sampled: set "
            "rollout.dynamic_sampling to null, its `by` to selection, or leave the term out"
        )


def _check_sources(terms: Sequence[Term], setting: RewardContext) -> None:
    sources = {task.source for task in setting.tasks} | {*setting.made_sources}
    for term in terms:
        for source in term.sources or ():
            if source not in sources:
                named = sorted(s for s in sources if s is not None)
                raise ConfigError(
                    f"rewards: no task is of the source {source!r} of {term.name!r}{nearest(source, named)}; a plan "
                    "that makes tasks of it names it in its `sources`"
                )
    # Rollouts of these tasks would have a reward of 0 without any term, which looks like a wrong answer.
    if terms and all(term.sources is not None for term in terms):
        without = sources - {source for term in terms for source in term.sources or ()}
        if without:
            raise ConfigError(
                f"rewards: tasks of the source {sorted(map(str, without))[0]!r} have no term: add it to the "
                "`sources` of one"
            )


def _check_fields(terms: Sequence[Term], tasks: Sequence[Task]) -> None:
    """ConfigError where a plain function asks for a field that some task lacks; names the term and the first such
    tasks."""
    for term in terms:
        of_term = [task for task in tasks if term.sources is None or task.source in term.sources]
        for part in walk([term]):
            if not isinstance(part.function, PerCompletion):
                continue
            problems = {task.id: problem for task in of_term if (problem := part.function.missing(task)) is not None}
            if problems:
                first = next(iter(problems))
                named = ", ".join(map(repr, list(problems)[:SHOWN]))
                raise ConfigError(
                    f"rewards: the term {part.name!r} cannot be computed for {len(problems)} of {len(of_term)} tasks "
                    f"({named}{', ...' if len(problems) > SHOWN else ''}): {problems[first]}. Add the field, give the "
                    "parameter a default, or give the term the `sources` of the tasks that have the field"
                )


def at_step(terms: Sequence[Term], step: int, steps: int) -> list[Term]:
    """The terms with every scheduled or driven weight and option as the float it is at `step` of `steps`."""

    def now(term: Term) -> Term:
        weight = scalar_value(term.weight, step, steps)
        return dataclasses.replace(term, function=at(term.function, step, steps), weight=weight)

    return [term.each(now) for term in terms]


def components_of(terms: Sequence[Term]) -> list[tuple[str, Any]]:
    """(`reward/<term>`, component) of all terms: each term, which holds its weight, then its function."""
    return [(f"reward/{term.name}", item) for term in walk(terms) for item in (term, term.function)]


# scoring


def score(batch: Batch, terms: Sequence[Term]) -> Batch:
    """Add the columns `reward/<term>` and their weighted sum `reward` to the batch.

    ConfigError when a term returns something other than one number per rollout.
    """
    total = np.zeros(len(batch))
    for rollout in batch.rollouts:
        # A new mapping: copies of a rollout share theirs.
        rollout.spans = {}
    for term in terms:
        if term.sources is None:
            total = total + _contribution(batch, term)
        else:
            total = total + _on_sources(batch, term)
    batch.columns["reward"] = total
    return batch


def show_monitored(batch: Batch, terms: Sequence[Term], monitoring: Monitoring) -> None:
    """Show the terms that ask for this monitoring the responses to it, with the values of what they are made of."""
    for term in walk(terms):
        if term.function.monitoring == monitoring:
            term.function.monitored(batch, **_inner_values(batch, term))


def call_plain(batch: Batch, terms: Sequence[Term]) -> None:
    """Call the terms that are plain functions, and those inside of other terms, for the rollouts that they apply to;
    the values are kept with the rollouts, where `score` finds them."""
    for term in terms:
        if term.sources is None:
            part = batch
        else:
            part = batch.select(np.flatnonzero(_applies(term, batch)))
        for one in walk([term]):
            if isinstance(one.function, PerCompletion):
                one.function(part)


def _applies(term: Term, batch: Batch) -> np.ndarray:
    """The rollouts whose tasks are of the term's sources, bool [B]."""
    return np.asarray([r.task.source in (term.sources or ()) for r in batch.rollouts], dtype=bool)


def _on_sources(batch: Batch, term: Term) -> np.ndarray:
    """Return the term's contribution to the rewards: 0 on tasks of other sources, where its columns are NaN."""
    on = _applies(term, batch)
    part = batch.select(np.flatnonzero(on))
    # Only columns that this term made are copied back: `select` gave the part all others of the batch.
    before = set(part.columns)
    added = np.zeros(len(batch))
    added[on] = _contribution(part, term)
    for name in set(part.columns) - before:
        batch.columns[name] = np.full(len(batch), np.nan)
        batch.columns[name][on] = part.columns[name]
    return added


def _contribution(batch: Batch, term: Term) -> np.ndarray:
    """The part of each response's reward that the term gives, float64 [B]."""
    values = _evaluate(batch, term)
    if isinstance(values, SpanRewards):
        for rollout in batch.rollouts:
            rollout.spans[term.name] = dataclasses.replace(rollout.spans[term.name], weight=_factor(term.weight))
        if values.responses is None:
            return np.zeros(len(batch))
        values = values.responses
    return _weighted(term.weight, values)


def _evaluate(batch: Batch, term: Term) -> TermValues:
    """The values of a term, after those that it is made of; each becomes a column.

    A term of weight 0 is only monitored: where it fails, a warning says so and its columns are NaN.
    """
    try:
        return _values(batch, term)
    except (UserCodeError, ConfigError) as error:
        if _factor(term.weight):
            raise
        # By text: an error that names another rollout is new, the same one at each step is not.
        if str(error) not in term.warned:
            term.warned.add(str(error))
            log.warning("%s\nIts weight is 0, so the run goes on without its values (reported once)", error)
        for one in walk([term]):
            batch.columns.setdefault(f"reward/{one.name}", np.full(len(batch), np.nan))
        return batch.columns[f"reward/{term.name}"]


def _values(batch: Batch, term: Term) -> TermValues:
    """Compute the columns of a term and of those that it is made of. UserCodeError and ConfigError name the term that
    fails."""

    held = _inner_values(batch, term)
    try:
        if any(isinstance(values, SpanRewards) for values in _flat(held)):
            returned: Any = on_spans(term.function, term.name, batch, held)
        else:
            returned = term.function(batch, **held)
    # Errors of the library name what is wrong in the configuration; they are no failure of the user's code.
    except RlvrError:
        raise
    # The user's code may raise anything; the traceback is cut to its own lines.
    except USER_CODE_ERRORS as error:
        raise UserCodeError(f"the reward {term.name!r} failed on a batch", cut(user_traceback(error))) from error
    if isinstance(returned, SpanRewards):
        return noted(returned, term.name, batch)
    try:
        values = np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {term.name!r} gave something other than one number per rollout: {error}") from error
    if values.shape != (len(batch),):
        raise ConfigError(
            f"reward {term.name!r} returned shape {values.shape} for {len(batch)} rollouts: one number each is needed"
        )
    # An infinite reward would make every advantage of its group NaN; as undecided it costs one rollout.
    values = np.where(np.isfinite(values), values, np.nan)
    batch.columns[f"reward/{term.name}"] = values
    return values


def _inner_values(batch: Batch, term: Term) -> dict[str, Any]:
    """Option -> the values of the term, or of the terms, that it holds."""

    def weighted(one: Term) -> TermValues:
        values = _evaluate(batch, one)
        if isinstance(values, SpanRewards):
            return values.scaled(_factor(one.weight))
        return _weighted(one.weight, values)

    return {k: [weighted(t) for t in v] if isinstance(v, list) else weighted(v) for k, v in term.inner.items()}


def _flat(held: Mapping[str, Any]) -> list[TermValues]:
    return [one for value in held.values() for one in (value if isinstance(value, list) else [value])]


def _weighted(weight: Scalar, values: np.ndarray) -> np.ndarray:
    """The weight times the values; 0 where the weight is 0, also of undecided values: such a term is only monitored.

    Where no step is known (`at_step` was not called) the weight is that of the first step.
    """
    factor = _factor(weight)
    if factor:
        return factor * values
    return np.zeros(len(values))


def _factor(weight: Scalar) -> float:
    return float(scalar_value(weight, 0, 1))


@register("reward", "verdict")
@dataclass(frozen=True)
class VerdictScore(RewardTerm):
    """The score of each rollout's verdict; NaN where undecided or missing."""

    part: str | None = None
    """A named score of the verdict in place of the score: `combine` has one for each of its verifiers, `instructions`
    one for each instruction."""
    verifier: str | None = None
    """The verifier whose verdict is taken, where a rollout has several: one of the configuration's `verifiers`, by its
    name, or `turn 1` of the plan `turns` with `judge: each`, say; a rollout without it counts as `missing`. null: the
    task's own."""
    missing: float | None = None
    """The value of a decided verdict without that score; null: undecided."""

    def check_config(self, config: Config) -> None:
        """ConfigError for a name that is nearly one of the `verifiers`, where tasks cannot name others."""
        if config.verifier is not None:
            self._check_name(config, names=(), others=True)

    def bind(self, setting: RewardContext) -> RewardTerm:
        """ConfigError for a name under which no rollout has a verdict. Where a plan adds verdicts their names are not
        known, and what is nearly one of the `verifiers` is refused alone."""
        self._check_name(setting.config, [task.verifier for task in setting.tasks], setting.adds_verdicts)
        return self

    def _check_name(self, config: Config, names: Sequence[str | None], others: bool) -> None:
        """`names`: of the tasks' verifiers; `others`: rollouts may have verdicts of further names."""
        if self.verifier is None:
            return
        own = config.verifier
        known = {*config.verifiers, *names, None if own is None else own.name}
        meant = nearest(self.verifier, config.verifiers)
        if self.verifier not in known and (not others or "did you mean" in meant):
            raise ConfigError(f"rewards: there is no verifier {self.verifier!r} in `verifiers`{meant}")

    def __call__(self, batch: Batch, *_: Any, **given: Any) -> np.ndarray:
        """Return float64 [B]. ConfigError where no verdict has the score `part`."""
        verdicts = [r.verdict if self.verifier is None else r.verdicts.get(self.verifier) for r in batch.rollouts]
        missing = np.nan if self.missing is None else self.missing
        if self.part is None:
            # The task's own verdict is missing only where nothing was verified, which is undecided.
            absent = np.nan if self.verifier is None else missing
            scores = [absent if v is None else np.nan if v.score is None else v.score for v in verdicts]
            return np.asarray(scores, dtype=np.float64)
        decided = [v for v in verdicts if v is not None and v.decided]
        if self.missing is None and decided and not any(self.part in v.scores for v in decided):
            names = sorted({name for v in decided for name in v.scores})
            raise ConfigError(
                f"rewards: no verdict has a score named {self.part!r}{nearest(self.part, names)}; set `missing` where "
                "a verdict may be without it"
            )
        scores = [v.scores.get(self.part, missing) if v is not None and v.decided else np.nan for v in verdicts]
        return np.asarray(scores, dtype=np.float64)


def lengths(batch: Batch) -> np.ndarray:
    """float64 [B]: tokens of each rollout that the policy wrote."""
    return np.asarray([int(r.sampled.sum()) for r in batch.rollouts], dtype=np.float64)
