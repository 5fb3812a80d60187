"""The objective of an optimizer step: named loss components, each with its token weights and coefficient."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rlvr.components import Correction, Loss, SequenceLoss, TokenSelector
from rlvr.core.needs import PROXIMAL, REFERENCE, Need, Statistic
from rlvr.core.schedules import Scalar, at
from rlvr.losses.tokens import Denominators
from rlvr.records import Batch


@dataclass(frozen=True)
class ObjectiveTerm:
    """One term of the objective: coef x loss over the tokens that `weight/<weights>` marks.

    `zero_without_advantage` says that a token whose advantage is 0 adds nothing to the loss's gradient, so that rollouts
    of zero-variance groups can be skipped when no other component needs them.
    """

    name: str
    loss: Loss | SequenceLoss
    weights: str
    coef: Scalar = 1.0
    zero_without_advantage: bool = False
    corrected: bool = False
    """Whether the objective's correction weighs its tokens."""
    keep: tuple[TokenSelector, ...] = ()
    """Which tokens of the step it learns from; the product of what they give."""
    by_token: bool = False
    """Whether the token column `factor/<name>` multiplies the coefficient at each token."""
    needs_of_step: frozenset[Need] = field(init=False)
    """Statistics of the whole optimizer step that it is shown before the step is cut; empty where it asks for nothing."""

    def __post_init__(self) -> None:
        needs = set().union(*(selector.needs for selector in self.keep))
        needs |= self.loss.needs if isinstance(self.loss, SequenceLoss) else self.loss.chooses_by
        object.__setattr__(self, "needs_of_step", frozenset(Need(n.statistic, n.model, k=n.k) for n in needs))

    def at(self, step: int, steps: int) -> ObjectiveTerm:
        """Return the term with plain numbers for every scheduled scalar of its own, its loss and its selectors."""
        term: ObjectiveTerm = at(self, step, steps)
        loss = at(term.loss, step, steps)
        keep = tuple(at(selector, step, steps) for selector in term.keep)
        same = loss is term.loss and all(map(operator.is_, keep, term.keep))
        return term if same else dataclasses.replace(term, loss=loss, keep=keep)


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
    """Whether later optimizer steps of a batch take their ratio to the policy as it was when the update began (Hilton et
    al. 2021, "Batch size-invariance for policy optimization"), not to the one that sampled. With a correction they always do."""
    renewal: Renewal | None = None
    """How the reference follows the policy; None: it stays."""

    def at(self, step: int, steps: int) -> Objective:
        """The objective with plain numbers for every scheduled scalar, without the components that weigh nothing."""
        components = [component.at(step, steps) for component in self.components]
        renewal = self.renewal if self.renewal and (step + 1) % self.renewal.every == 0 else None
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
        """What components ask of the proximal policy beside its log-probs."""
        asked = {need.statistic for need in self.needs if need.model == PROXIMAL}
        return tuple(sorted(asked - {"logprobs"}))

    @property
    def recalls_update(self) -> bool:
        """Whether later optimizer steps of a batch compare with the policy as it was when the update began.

        A correction weighs by proximal over behaviour probability. Were the ratio of a later step taken to the behaviour
        policy, that weight would be 1 and the engine's gap would enter the ratio unbounded. So the ratio is to recomputed
        log-probs and the weight multiplies it in every step, as in TRL 1.16 (`GRPOTrainer._compute_loss`,
        `importance_sampling_ratio`) and verl (`compute_policy_loss_vanilla`, `rollout_is_weights`).
        """
        corrects = self.correction is not None and any(component.corrected for component in self.components)
        return self.decoupled or corrects or bool(self.proximal_statistics)

    @property
    def needs_reference(self) -> bool:
        """Whether a component compares with the reference."""
        return any(need.model == REFERENCE for need in self.needs)

    def denominators(self, batch: Batch) -> dict[str, Denominators]:
        """What each component averages over in `batch` (this rank's share of it)."""
        return {c.name: self._denominator(c, batch) for c in self.components}

    def _denominator(self, component: ObjectiveTerm, batch: Batch) -> Denominators:
        sums = np.asarray([float(w.sum()) for w in batch.tokens(f"weight/{component.weights}")])
        constant = component.loss.constant or self.constant
        groups = len(np.unique(batch.group_index()[sums > 0])) if component.loss.average == "groups" else 0
        return Denominators(float(sums.sum()), float((sums > 0).sum()), float(constant), float(groups))

    def trains(self, batch: Batch) -> np.ndarray:
        """bool [B]: the rollouts that can have a gradient, so that the others cost no forward and no backward."""
        needed = np.zeros(len(batch), dtype=bool)
        advantages = batch.tokens("advantage") if batch.has("advantage") else None
        for component in self.components:
            for i, weight in enumerate(batch.tokens(f"weight/{component.weights}")):
                live = weight != 0
                if component.zero_without_advantage and advantages is not None:
                    live = live & (advantages[i] != 0)
                needed[i] |= bool(live.any())
        return needed
