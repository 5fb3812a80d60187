"""The objective of an optimizer step: named loss components, each with its token weights and coefficient; and the
metrics and losses of the step, gathered over its micro-batches.

Invariants of `StepMetrics`: what is added stays a tensor on the device until `fetch` takes all of it to the host by one
copy, so that the host does not wait for the device once for each metric. The sums are those that fetching each at once
would give, to the last bit.

Invariants of `Averages`, which gathers numbers over micro-batches, optimizer steps and ranks:
- It keeps (sum, weight) per name, so that the mean does not depend on how the work was divided.
- A name that ends in `/max` or `_max` keeps the largest value instead; a NaN stays a NaN.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from rlvr.components import Loss, SequenceLoss, TokenSelector
from rlvr.core.needs import PROXIMAL, REFERENCE, Need, Statistic
from rlvr.core.schedules import Scalar, at
from rlvr.errors import ConfigError
from rlvr.losses.correction import Correction, ratios
from rlvr.losses.tokens import AVERAGES, Denominators, TokenBatch
from rlvr.records import Batch


@dataclass(frozen=True)
class ObjectiveTerm:
    """One term of the objective: coef x loss over the tokens that `weight/<weights>` marks.

    `zero_without_advantage` says that a token whose advantage is 0 adds nothing to the loss's gradient, so that
    rollouts of zero-variance groups can be skipped when no other component needs them.
    """

    name: str
    loss: Loss | SequenceLoss
    weights: str
    coef: Scalar = 1.0
    zero_without_advantage: bool = False
    corrected: bool = False
    """True if the objective's correction weighs the tokens of this term."""
    keep: tuple[TokenSelector, ...] = ()
    """Selectors of the tokens that the term learns from; the factors that they give are multiplied."""
    by_token: bool = False
    """True if the token column `factor/<name>` multiplies the coefficient at each token."""
    needs_of_step: frozenset[Need] = field(init=False)
    """Statistics of the whole optimizer step that it is shown before the step is cut; empty where it asks for
    nothing."""
    reads: tuple[str, ...] = field(init=False)
    """Columns of the batch that its loss reads."""

    def __post_init__(self) -> None:
        if self.loss.average not in AVERAGES:
            raise ConfigError(
                f"the loss of {self.name!r} has average={self.loss.average!r}: it is one of {', '.join(AVERAGES)}"
            )
        needs = set().union(*(selector.needs for selector in self.keep))
        if isinstance(self.loss, SequenceLoss):
            needs |= self.loss.needs
        else:
            needs |= self.loss.chooses_by
        # Without `grad`: the prepass has none. object.__setattr__ because the dataclass is frozen.
        object.__setattr__(self, "needs_of_step", frozenset(Need(n.statistic, n.model) for n in needs))
        object.__setattr__(self, "reads", tuple(self.loss.reads))

    def at(self, step: int, steps: int) -> ObjectiveTerm:
        """Return the term with plain numbers for every scheduled scalar of its own, its loss and its selectors."""
        term: ObjectiveTerm = at(self, step, steps)
        loss = at(term.loss, step, steps)
        keep = tuple(at(selector, step, steps) for selector in term.keep)
        # Terms without a schedule stay the same object, so that most steps build nothing.
        same = loss is term.loss and all(map(operator.is_, keep, term.keep))
        if same:
            return term
        return dataclasses.replace(term, loss=loss, keep=keep)


@dataclass(frozen=True)
class Renewal:
    """After every `every` steps the reference becomes mix x policy + (1 - mix) x reference."""

    every: int
    mix: float


@dataclass(frozen=True)
class Objective:
    """The components of a step, and the length that the constant average divides by."""

    components: tuple[ObjectiveTerm, ...]
    constant: float = 1.0
    correction: Correction | None = None
    """Weights for the gap between proximal and behaviour policy."""
    decoupled: bool = False
    """True if later optimizer steps of a batch take their ratio to the policy as it was when the update began (Hilton
    et al. 2021, "Batch size-invariance for policy optimization"), not to the one that sampled. With a correction they
    always do."""
    renewal: Renewal | None = None
    """The schedule by which the reference follows the policy; None: it stays."""

    def at(self, step: int, steps: int) -> Objective:
        """The objective with plain numbers for every scheduled scalar, without the components that weigh nothing."""
        components = [component.at(step, steps) for component in self.components]
        # `step` counts from 0, and the reference is renewed after a step: the first time after `every` of them.
        if self.renewal and (step + 1) % self.renewal.every == 0:
            renewal = self.renewal
        else:
            renewal = None
        # A term of weight 0 would still cost the statistics that it needs and the tokens that only it trains.
        return dataclasses.replace(self, components=tuple(c for c in components if c.coef != 0.0), renewal=renewal)

    @cached_property
    def needs(self) -> frozenset[Need]:
        """All statistics that the components ask for."""
        return frozenset().union(*(c.loss.needs for c in self.components))

    @cached_property
    def shown_the_step(self) -> tuple[ObjectiveTerm, ...]:
        """The components that have to see the whole optimizer step, by one pass without gradient, before it is cut."""
        return tuple(component for component in self.components if component.needs_of_step)

    @cached_property
    def proximal_statistics(self) -> tuple[Statistic, ...]:
        """Return the statistics of the proximal policy that components need beside its log-probs."""
        statistics = {need.statistic for need in self.needs if need.model == PROXIMAL}
        return tuple(sorted(statistics - {"logprobs"}))

    @property
    def recalls_update(self) -> bool:
        """Return True if later optimizer steps of a batch compare with the policy as it was when the update began.

        A correction weighs by proximal over behaviour probability. Were the ratio of a later step taken to the
        behaviour policy, that weight would be 1 and the engine's gap would enter the ratio unbounded. So the ratio is
        to recomputed log-probs and the weight multiplies it in every step, as in TRL 1.16 (`GRPOTrainer._compute_loss`,
        `importance_sampling_ratio`) and verl (`compute_policy_loss_vanilla`, `rollout_is_weights`).
        """
        corrects = self.correction is not None and any(component.corrected for component in self.components)
        return self.decoupled or corrects or bool(self.proximal_statistics)

    @property
    def needs_reference(self) -> bool:
        """Return True if a component compares with the reference."""
        return any(need.model == REFERENCE for need in self.needs)

    def denominators(self, batch: Batch) -> dict[str, Denominators]:
        """Return the denominators of each component's average in `batch` (this rank's share of it)."""
        return {c.name: self._denominator(c, batch) for c in self.components}

    def _denominator(self, component: ObjectiveTerm, batch: Batch) -> Denominators:
        # [B]: the weight of each rollout. Counted on the whole batch before it is cut, and on every rank, which all
        # hold it.
        sums = np.asarray([float(w.sum()) for w in batch.tokens(f"weight/{component.weights}")])
        constant = component.loss.constant or self.constant
        if component.loss.average == "groups":
            # Counted only for the average that divides by it.
            groups = len(np.unique(batch.group_index()[sums > 0]))
        else:
            groups = 0
        return Denominators(float(sums.sum()), float((sums > 0).sum()), float(constant), float(groups))

    def trains(self, batch: Batch) -> np.ndarray:
        """bool [B]: the rollouts that can have a gradient, so that the others cost no forward and no backward."""
        needed = np.zeros(len(batch), dtype=bool)
        if batch.has("advantage"):
            advantages = batch.tokens("advantage")
        else:
            advantages = None
        for component in self.components:
            for i, weight in enumerate(batch.tokens(f"weight/{component.weights}")):
                live = weight != 0
                if component.zero_without_advantage and advantages is not None:
                    # The loss is proportional to the advantage at every token, so these tokens have neither value nor
                    # gradient.
                    live = live & (advantages[i] != 0)
                needed[i] |= bool(live.any())
        return needed


# A probability ratio of 1.1. Arbitrary: if it moves, the metric `mismatch/share_over` alone moves.
GATE = 0.1
"""Nats: a gap between proximal and behaviour log-probs over this is counted in `mismatch/share_over`."""


class Averages:
    """Means by name. `add` a sum and the weight it is over; `means` gives sum / weight of all that was added."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add `total`, a sum over `weight` things (tokens, say), to `name`; for a maximum, `total` is a value.

        A weight of 0 says that there was nothing to measure. ValueError when it is negative.
        """
        total = float(total)
        weight = float(weight)
        if weight < 0:
            raise ValueError(f"the weight of {name!r} must not be negative: {weight}")
        before, seen = self._pairs.get(name, (0.0, 0.0))
        if is_maximum(name):
            # A weight of 0 says that nothing was measured, and its value must not win.
            values = [x for x, w in ((before, seen), (total, weight)) if w > 0]
            total = _largest(values)
        else:
            total += before
        self._pairs[name] = (total, seen + weight)

    def update(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        """Add many (sum, weight) pairs: those of one micro-batch, or what `pairs` gave on another rank."""
        for name, (total, weight) in pairs.items():
            self.add(name, total, weight)

    def pairs(self) -> dict[str, tuple[float, float]]:
        """Return the gathered numbers, to be sent to another rank."""
        return dict(self._pairs)

    def means(self) -> dict[str, float | None]:
        """The mean (or maximum) of each name; None where the weights sum to 0."""
        return {
            name: None if not weight else total if is_maximum(name) else total / weight
            for name, (total, weight) in self._pairs.items()
        }


def is_maximum(name: str) -> bool:
    """Return True if values called `name` are combined by their maximum rather than their mean."""
    return name.endswith(("/max", "_max"))


def _largest(values: list[float]) -> float:
    # Of numbers of the host. Python's maximum depends on where a NaN stands.
    if any(map(math.isnan, values)):
        return math.nan
    return max(values, default=0.0)


@dataclass(frozen=True)
class Fetched:
    """Sums over a rank's micro-batches of an optimizer step."""

    averages: Averages
    losses: dict[str, float]
    """The rank's share of each component's loss, by name."""
    finite: bool
    """True if the total loss of every micro-batch is a finite number."""


class StepMetrics:
    """Gathers them for one rank; a number may be a tensor of no dimension."""

    def __init__(self) -> None:
        self._sums: list[tuple[str, torch.Tensor, torch.Tensor | float]] = []
        self._losses: list[tuple[str, torch.Tensor]] = []
        self._totals: list[torch.Tensor] = []

    def add(self, name: str, total: torch.Tensor, weight: torch.Tensor | float = 1.0) -> None:
        """Add a sum over `weight` things, or a value of a maximum; see Averages."""
        self._sums.append((name, total.detach(), weight))

    def add_values(self, metrics: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """Add metrics of tokens [T], averaged by their weights [T]; a maximum is over all of them."""
        for name, values in metrics.items():
            if is_maximum(name):
                self.add(name, values.max())
            else:
                # Both sums [] stay on the device: no value is read before `fetch`.
                self.add(name, (weight * values).sum(), weight.sum())

    def add_mismatch(self, tokens: TokenBatch, known: torch.Tensor | None, correction: Correction | None) -> None:
        """Add the log-ratio of the proximal to the behaviour policy, and what the correction makes of it.

        `known`: the places of the tokens whose behaviour log-prob is known, int64 [N]; None: all. A token is touched
        where its weight is not the ratio, at the level that the correction bounds, or not 1 where a cap of null leaves
        the ratios out.
        """
        log_ratio = tokens.behaviour_log_ratio
        if known is None:
            measured = log_ratio
        else:
            # By places that the host knows: a mask would make the host wait for its count.
            measured = log_ratio.index_select(0, known)
        count = float(len(measured))
        for name, total in mismatch_sums(measured).items():
            self.add(name, total, 1.0 if is_maximum(name) else count)
        if tokens.importance is None:
            return
        self.add("correction/weight", tokens.importance.sum(), count)
        assert correction is not None, "a correction gave the weights"
        if correction.cap is None:
            # [T]: the weight that a token has where the correction does not act.
            plain = torch.ones_like(log_ratio)
        else:
            plain = ratios(tokens, correction.level)
        self.add("correction/touched", (tokens.importance != plain).sum(), count)

    def add_loss(self, component: str, value: torch.Tensor) -> None:
        """Add a micro-batch's share of a component's loss."""
        self._losses.append((component, value.detach()))

    def add_total(self, value: torch.Tensor) -> None:
        """Add the total loss of a micro-batch, which has to be finite."""
        self._totals.append(value.detach())

    def fetch(self, components: Sequence[str]) -> Fetched:
        """All that was added, by one copy from the device; the losses of all `components`."""
        weights = [weight for _, _, weight in self._sums if isinstance(weight, torch.Tensor)]
        sums = [total for _, total, _ in self._sums]
        losses = [loss for _, loss in self._losses]
        # Taken out below in the order in which they are listed here; what remains at the end are the totals.
        numbers = iter(_numbers([*sums, *weights, *losses, *self._totals]))
        totals = [next(numbers) for _ in sums]
        of_weights = [next(numbers) if isinstance(w, torch.Tensor) else w for _, _, w in self._sums]
        averages = Averages()
        for (name, _, _), total, weight in zip(self._sums, totals, of_weights, strict=True):
            averages.add(name, total, weight)
        by_component = dict.fromkeys(components, 0.0)
        for name, _ in self._losses:
            by_component[name] += next(numbers)
        return Fetched(averages, by_component, all(map(math.isfinite, numbers)))


def mismatch_sums(log_ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums (the largest, of a maximum) over log-ratios [N] of the proximal to the behaviour policy, by metric; none of
    none."""
    if len(log_ratio) == 0:
        return {}
    # [N], in nats, clamped to LARGEST_LOG_RATIO: the square of exp(30) is 1.1e26, which float32 holds.
    size = log_ratio.abs()
    ratio = log_ratio.exp()
    return {
        "mismatch/mean": size.sum(),
        "mismatch/max": size.max(),
        "mismatch/share_over": (size > GATE).sum(),
        # r - 1 - log r with r = proximal / behaviour and tokens from behaviour: KL(behaviour || proximal), Schulman's
        # k3.
        "mismatch/kl": (ratio - 1 - log_ratio).sum(),
        "ratio_to_behaviour": ratio.sum(),
        "ratio_to_behaviour_squared": ratio.square().sum(),
    }


def with_effective_size(means: dict[str, float | None]) -> dict[str, float | None]:
    """The step's metrics with the share of tokens that the importance weights leave effective (Kish 1965)."""
    # Kish: (sum w)^2 / sum w^2 effective tokens, over their number n: mean(w)^2 / mean(w^2).
    first = means.pop("ratio_to_behaviour", None)
    second = means.pop("ratio_to_behaviour_squared", None)
    return means | {"mismatch/effective": first * first / second if first and second else None}


def _numbers(values: Sequence[torch.Tensor]) -> list[float]:
    """Tensors of no dimension as numbers, by one copy; a count is exact, as it is not rounded to float32 on the way."""
    by_type: dict[torch.dtype, list[int]] = {}
    for place, value in enumerate(values):
        by_type.setdefault(value.dtype, []).append(place)
    if not by_type:
        return []
    # One tensor for each type and one copy for all. float64 holds every float32, and counts up to 2^53, exactly.
    stacked = [torch.stack([values[place] for place in places]).double() for places in by_type.values()]
    numbers = dict(zip([p for places in by_type.values() for p in places], torch.cat(stacked).tolist(), strict=True))
    return [numbers[place] for place in range(len(values))]
