"""A verifier made of verifiers: their weighted sum, all of them, any of them, behind a gate, or one per source of
tasks.

Invariants: a part is judged as it would be alone, with its own isolation and time limit where a pool runs it; an
undecided part leaves the whole undecided, unless the others decide it already.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from rlvr import registry
from rlvr.core.specs import ComponentSpec
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Needs, Verifier, as_verifier, judged, judged_group
from rlvr.verifiers.run_models import RunModels

How = Literal["weighted", "all", "any", "gated", "routed"]
Verify = Callable[[Verifier], Awaitable[Verdict]]
"""Judges one part on the task and completion at hand, on a pool for example."""
VerifyGroup = Callable[[Verifier, Sequence[int]], Awaitable[list[Verdict]]]
"""Judges one part on the completions of the group at hand that stand at these positions."""

DEFAULT = "default"
"""The key of a routed combination's part for sources that have none of their own."""

# Weights like 1/3 do not add up to 1 exactly; scores that differ by less are one.
_CLOSE = 1e-9
_FAILURES = (VerdictStatus.TIMEOUT, VerdictStatus.ERROR, VerdictStatus.UNPARSABLE)
"""Statuses of a combination that scores 0: the first of these that a part has, else it is wrong."""


@dataclass(frozen=True)
class PartSpec(ComponentSpec):
    """A verifier with its weight in the combination."""

    extra_keys = ("weight",)


def _checked_part(written: Any) -> Any:
    """The part as it is. ValueError for one that is written and cannot be built."""
    named = written.get("name", "") if isinstance(written, Mapping) else written
    if not isinstance(named, str | Verifier | ComponentSpec) and not callable(named):
        raise ValueError("a part is a verifier, a function, a name, or a mapping with one of these as `name`")
    try:
        if isinstance(written, str) or (isinstance(written, Mapping) and isinstance(written.get("name", ""), str)):
            registry.check_options("verifier", PartSpec.parse(written))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return written


Part = Annotated[Any, AfterValidator(_checked_part)]


@register_verifier("combine")
@dataclass
class CombineVerifier(Verifier):
    """Several verifiers as one: a weighted sum, all, any, behind a gate, or one per source.

    - `weighted`: the sum of weight x score. It is `correct` when it reaches the sum of the positive weights.
    - `all`: the least score of the parts. Undecided parts do not matter once one part scores 0.
    - `any`: the greatest score. Undecided parts do not matter once one part scores 1.
    - `gated`: the first part is the gate. Where it scores 1 the others decide as in `weighted`; where it scores less
      they are not run, and the score is 0.
    - `routed`: the part under the task's `source` judges alone; the part under `default` judges sources without one.

    A part that compares a group's answers (`verify_group`) is given the whole group, behind a gate the members that
    passed it. A part of weight 0 is reported and never decides. `Verdict.scores` holds each decided part's score by its
    name, and the scores within it as `part/name`. The answer reported is that of the first part that has one.
    """

    parts: list[Part] | dict[str, Part]
    """Verifiers as they are written elsewhere, each with a `weight` if it likes; or a mapping, whose keys name them.
    For `routed` the keys are the sources of tasks."""
    how: How = "weighted"
    """The rule that makes one verdict of those of the parts."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("combine: it needs at least one part")
        if self.how == "routed" and not isinstance(self.parts, Mapping):
            raise ConfigError("combine: how=routed needs `parts` as a mapping from a task's source to a verifier")
        if self.how == "gated" and len(self.parts) < 2:
            raise ConfigError("combine: how=gated needs a gate and at least one part behind it")
        keyed = self.parts.items() if isinstance(self.parts, Mapping) else ((None, part) for part in self.parts)
        self.verifiers: dict[str, Verifier] = {}
        weights: list[float | None] = []
        for label, piece in keyed:
            name, verifier, weight = _part(piece)
            self.verifiers[_unused(label or name, self.verifiers)] = verifier
            weights.append(weight)
        self.weights = dict(zip(self.verifiers, _filled(weights, self.how), strict=True))
        self.needs = Needs(sandbox=any(part.needs.sandbox for part in self.verifiers.values()))  # type: ignore[misc]
        # Enough for parts that run one after the other.
        self.time_limit = sum(part.time_limit for part in self.verifiers.values())

    async def verify(self, task: Task, completion: str) -> Verdict:
        """The verdict without a pool: every part runs here."""
        return await self.compose(task, completion, lambda part: judged(part, task, completion))

    async def compose(self, task: Task, completion: str, verify: Verify) -> Verdict:
        """The verdict, with every part judged by `verify`, several at once."""

        async def verify_one(part: Verifier, members: Sequence[int]) -> list[Verdict]:
            return [await verify(part) for _ in members]

        (verdict,) = await self._composed(task, 1, verify_one)
        return verdict

    @property
    def gives_spans(self) -> bool | None:
        """True where a part gives spans; None where no part says so and one does not know."""
        said = {part.gives_spans for part in self.verifiers.values()}
        return True if True in said else None if None in said else False

    @property
    def verify_group(self) -> Callable[..., Any] | None:  # type: ignore[override]
        """The verdicts on a group without a pool, where a part compares the answers of a group; else None."""
        return self._verify_group if self._compares else None

    @property
    def compose_group(self) -> Callable[..., Any] | None:  # type: ignore[override]
        """The verdicts on a group, with every part judged by `verify`, where a part compares the answers of a group;
        else None."""
        return self._compose_group if self._compares else None

    @property
    def _compares(self) -> bool:
        return any(part.verify_group is not None for part in self.verifiers.values())

    async def _verify_group(self, task: Task, completions: Sequence[str]) -> list[Verdict]:
        async def verify(part: Verifier, members: Sequence[int]) -> list[Verdict]:
            texts = [completions[member] for member in members]
            if part.verify_group is not None:
                return await judged_group(part, task, texts)
            return list(await asyncio.gather(*(judged(part, task, text) for text in texts)))

        return await self._composed(task, len(completions), verify)

    async def _compose_group(self, task: Task, completions: Sequence[str], verify: VerifyGroup) -> list[Verdict]:
        return await self._composed(task, len(completions), verify)

    async def _composed(self, task: Task, count: int, verify: VerifyGroup) -> list[Verdict]:
        """The verdicts on `count` completions of a task, with every part judged by `verify`."""
        everyone = range(count)
        match self.how:
            case "routed":
                label = self._route(task)
                if label is None:
                    return [Verdict.undecided(self._lost(task))] * count
                judged_alone = await self._judge([label], everyone, verify)
                return [replace(one[label], traceback=_traceback(one), parts=_parts(one)) for one in judged_alone]
            case "gated":
                gate, *rest = self.verifiers
                verdicts = await self._judge([gate], everyone, verify)
                passed = [member for member in everyone if (verdicts[member][gate].score or 0) >= 1]
                behind = await self._judge(rest, passed, verify) if passed else []
                for member, further in zip(passed, behind, strict=True):
                    verdicts[member].update(further)
                return [self._joined(one, *gated(one, self.weights)) for one in verdicts]
            case _:
                verdicts = await self._judge(list(self.verifiers), everyone, verify)
                return [self._joined(one, *_RULES[self.how](one, self.weights)) for one in verdicts]

    def prepare(self) -> None:
        for part in self.verifiers.values():
            part.prepare()

    def attach(self, models: RunModels) -> None:
        for part in self.verifiers.values():
            part.attach(models)

    def check_task(self, task: Task) -> str | None:
        """The first complaint of a part that would judge the task, or that no part has its source."""
        labels = list(self.verifiers) if self.how != "routed" else [self._route(task)]
        for label in labels:
            if label is None:
                return self._lost(task)
            problem = self.verifiers[label].check_task(task)
            if problem is not None:
                return f"{label}: {problem}"
        return None

    def metrics(self) -> dict[str, float]:
        """Those of the parts, as `part/count`."""
        return {
            f"{label}/{name}": value
            for label, part in self.verifiers.items()
            if part.metrics is not None
            for name, value in part.metrics().items()
        }

    def judge_of(self, task: Task) -> Verifier:
        """The part that judges the task alone, where `how` is `routed`."""
        label = self._route(task) if self.how == "routed" else None
        if label is None:
            return self
        return self.verifiers[label].judge_of(task)

    def same_answer(self, first: str, second: str) -> bool:
        """Return True if some part holds the two for the same."""
        return any(part.same_answer(first, second) for part in self.verifiers.values())

    async def _judge(
        self, labels: Sequence[str], members: Sequence[int], verify: VerifyGroup
    ) -> list[dict[str, Verdict]]:
        """The verdicts of these parts by label, for each of the members."""
        # A pool judges the parts in parallel, so that the slowest one decides how long the whole takes.
        by_part = await asyncio.gather(*(verify(self.verifiers[label], members) for label in labels))
        return [dict(zip(labels, of_member, strict=True)) for of_member in zip(*by_part, strict=True)]

    def _joined(self, verdicts: Mapping[str, Verdict], status: VerdictStatus, score: float | None) -> Verdict:
        """The verdict of the whole, with what its parts said."""
        scores: dict[str, float] = {}
        for label, verdict in verdicts.items():
            if verdict.score is not None:
                scores[label] = verdict.score
            scores.update({f"{label}/{name}": value for name, value in verdict.scores.items()})
        gate = next(iter(self.verifiers)) if self.how == "gated" else None  # it decides, and has no weight
        deciding = {label: verdict for label, verdict in verdicts.items() if self.weights[label] or label == gate}
        return Verdict(
            status,
            score,
            reason="; ".join(f"{label}: {verdict.reason or verdict.status}" for label, verdict in verdicts.items()),
            answer=next((verdict.answer for verdict in verdicts.values() if verdict.answer is not None), None),
            scores=scores,
            spans=[span for verdict in verdicts.values() for span in verdict.spans],
            traceback="" if score is not None else _traceback(deciding),
            parts=_parts(deciding),
        )

    def _route(self, task: Task) -> str | None:
        for label in (task.source, DEFAULT):
            if label in self.verifiers:
                return label
        return None

    def _lost(self, task: Task) -> str:
        sources = ", ".join(self.verifiers)
        return f"combine has no part for the source {task.source!r} (it has {sources}); add it, or a part `{DEFAULT}`"


Decision = tuple[VerdictStatus, float | None]
Rule = Callable[[Mapping[str, Verdict], Mapping[str, float]], Decision]


def weighted(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Decision:
    """The sum of weight x score over the parts that weigh something; undecided where one of them is."""
    counted = {label: verdict for label, verdict in verdicts.items() if weights[label]}
    # math.fsum is exact up to one rounding: the order of the parts does not change the score.
    total = math.fsum(weights[label] * verdict.score for label, verdict in counted.items() if verdict.score is not None)
    return _decided(counted, total, math.fsum(weight for weight in weights.values() if weight > 0))


def least(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Decision:
    """The least score; 0 as soon as a part scores 0."""
    lowest = min((verdict.score for verdict in verdicts.values() if verdict.score is not None), default=math.nan)
    # Once a part scores 0 no undecided part can change the least score, so that none is needed.
    return _decided({} if lowest <= 0 else verdicts, lowest, 1.0, verdicts)


def greatest(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Decision:
    """The greatest score; 1 as soon as a part scores 1."""
    highest = max((verdict.score for verdict in verdicts.values() if verdict.score is not None), default=math.nan)
    return _decided({} if highest >= 1 else verdicts, highest, 1.0, verdicts)


def gated(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Decision:
    """The weighted sum of the parts after the first, which is the gate and stands alone where it did not pass."""
    rest = list(verdicts)[1:]
    if not rest:
        return _decided(verdicts, 0.0, 1.0)
    return weighted({label: verdicts[label] for label in rest}, {label: weights[label] for label in rest})


_RULES: dict[str, Rule] = {"weighted": weighted, "all": least, "any": greatest}


def _decided(
    needed: Mapping[str, Verdict], total: float, full: float, judged: Mapping[str, Verdict] | None = None
) -> Decision:
    """The status of a total out of `full`; undecided where a verdict that is needed is."""
    undecided = [verdict for verdict in needed.values() if verdict.score is None]
    if undecided:
        return undecided[0].status, None
    if abs(total - full) < _CLOSE:
        return VerdictStatus.CORRECT, full
    if total > full:
        return VerdictStatus.CORRECT, total
    if abs(total) >= _CLOSE:
        return VerdictStatus.PARTIAL, total
    statuses = {verdict.status for verdict in (judged or needed).values() if verdict.score is not None}
    return next((status for status in _FAILURES if status in statuses), VerdictStatus.WRONG), 0.0


def _parts(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """The `Verdict.parts` of a combination whose parts gave `verdicts`."""
    parts = {}
    for label, verdict in verdicts.items():
        if verdict.parts:
            parts.update({f"{label}/{name}": traceback for name, traceback in verdict.parts.items()})
        else:
            parts[label] = verdict.traceback
    return parts


def _traceback(verdicts: Mapping[str, Verdict]) -> str:
    """The first traceback of parts, under the name of its part; nothing where none raised."""
    raised = (f"part {label!r}:\n{verdict.traceback}" for label, verdict in verdicts.items() if verdict.traceback)
    return next(raised, "")


def _part(written: Any) -> tuple[str, Verifier, float | None]:
    """(name, verifier, weight) of a part: a component as written, a Verifier, a function, or a mapping with one as
    `name`."""
    if not isinstance(written, Mapping):
        return _name(written), as_verifier(written), None
    options = dict(written)
    weight = options.pop("weight", None)
    named = options.get("name")
    if weight is not None and (
        isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight)
    ):
        raise ConfigError(f"combine: the weight of {named!r} is {weight!r}, not a finite number")
    if named is None or isinstance(named, str):
        return _name(named), as_verifier(options), weight
    if len(options) > 1:
        raise ConfigError(f"combine: {named!r} is made already, so it takes no options but `weight`")
    return _name(named), as_verifier(named), weight


def _name(part: Any) -> str:
    """Return the name of a part that has no key: its written name, or that of its function or class."""
    if isinstance(part, str):
        return part.rpartition(":")[2]
    if isinstance(part, Verifier):
        return part.name
    return str(getattr(part, "__name__", type(part).__name__))


def _unused(label: str, taken: Mapping[str, Verifier]) -> str:
    """`label`, numbered from 2 where it is taken."""
    names = (label if number == 1 else f"{label}_{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def _filled(weights: Sequence[float | None], how: How) -> list[float]:
    """The weights, an equal share each where none is given."""
    is_weighted = [weight is not None for weight in weights]
    if how in ("all", "any", "routed"):
        if any(is_weighted):
            raise ConfigError(f"combine: how={how} takes no weights; they belong to weighted and gated")
        return [1.0] * len(weights)
    if how == "gated":
        if is_weighted[0]:
            raise ConfigError("combine: the gate (the first part of how=gated) takes no weight")
        return [0.0, *_filled(weights[1:], "weighted")]
    if any(is_weighted) and not all(is_weighted):
        raise ConfigError(
            "combine: some parts have a weight and some do not; give one to each, or to none (equal shares)"
        )
    if all(is_weighted) and not any(weight and weight > 0 for weight in weights):
        raise ConfigError("combine: no part has a weight above 0, so nothing could ever be paid")
    return [1 / len(weights) if weight is None else float(weight) for weight in weights]
