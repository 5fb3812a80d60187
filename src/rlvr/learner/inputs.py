"""Inputs of the learner from a batch: made once for all its optimizer steps, and for each micro-batch what its losses
read: the forward pass, and columns found in host memory and copied to the device at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.core.device_memory import to_device
from rlvr.core.needs import BEHAVIOUR, BEHAVIOUR_LOGPROBS, CURRENT, PROXIMAL, PROXIMAL_LOGPROBS, REFERENCE
from rlvr.errors import TrainingError
from rlvr.losses import Objective, ObjectiveTerm, TokenBatch
from rlvr.losses.prepass import PrepassResult
from rlvr.policy import MicroBatch
from rlvr.records import UPDATED, Batch

WITHOUT_DROPOUT = "without_dropout"
"""Marks statistics of the current policy that come from a pass without dropout."""


@dataclass
class Work:
    """A batch with what all its optimizer steps read of it, made once; one array [T_b] per rollout in each list."""

    batch: Batch
    objective: Objective
    config: OptimConfig
    trains: np.ndarray
    """bool [B]: the rollouts that can have a gradient."""
    weights: dict[str, list[np.ndarray]]
    """The token weights of each name that a component uses."""
    trained: list[np.ndarray]
    """bool: the tokens that any component gives a weight."""
    behaviour: list[np.ndarray]
    known: list[np.ndarray]
    """bool: the sampled tokens whose behaviour log-prob is known."""
    advantage: list[np.ndarray] | None
    reads: dict[str, list[np.ndarray]]
    """The columns that losses declare, by name."""
    reference: list[np.ndarray] = field(default_factory=list)
    proximal: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """By statistic; empty where the ratio is taken to the behaviour policy."""
    without_dropout: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """By statistic, of the optimizer step that is taken; empty where the pass that has gradients is not random."""
    group_weights: dict[str, np.ndarray] = field(default_factory=dict)
    """float64 [B]: the weight of each rollout's whole group, by the name of each component that averages over
    groups."""
    updated: list[np.ndarray] = field(default_factory=list)
    """Log-probs at the last optimizer step that a token was in (of this rank's share); NaN elsewhere."""

    @classmethod
    def of(cls, batch: Batch, objective: Objective, config: OptimConfig) -> Work:
        """The work on `batch`."""
        weights = {c.weights: batch.tokens(f"weight/{c.weights}") for c in objective.components}
        groups = batch.group_index()
        over_groups = [c for c in objective.components if c.loss.average == "groups"]
        # Only for the average over groups: per rollout the sum of its token weights, then summed by group below.
        sums = {c.weights: [w.sum(dtype=np.float64) for w in weights[c.weights]] for c in over_groups}
        return cls(
            batch,
            objective,
            config,
            trains=objective.trains(batch),
            weights=weights,
            # bool [T_b] each.
            trained=[np.any([w != 0 for w in of_one], axis=0) for of_one in zip(*weights.values(), strict=True)],
            behaviour=[r.behaviour_logprobs for r in batch.rollouts],
            known=[r.sampled & np.isfinite(r.behaviour_logprobs) for r in batch.rollouts],
            advantage=batch.tokens("advantage") if batch.has("advantage") else None,
            reads={name: batch.tokens(name) for c in objective.components for name in c.reads},
            group_weights={c.name: np.bincount(groups, sums[c.weights])[groups] for c in over_groups},
            updated=batch.token_columns.setdefault(
                UPDATED, [np.full(len(r), np.nan, dtype=np.float32) for r in batch.rollouts]
            ),
        )


Statistics = dict[tuple[str, str], torch.Tensor]
"""(statistic, model) -> [T] at the trained tokens."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a micro-batch's losses beside its forward pass, by (what, of which): in host memory, and on the device.

    float32 [T] at the trained tokens; of rollouts float64 [S]; places of tokens int64.
    """

    objective: Objective
    rows: MicroBatch
    first: bool
    """True if this is the batch's first optimizer step, whose proximal policy is the current one."""
    host: dict[tuple[str, str], np.ndarray]
    device: dict[tuple[str, str], torch.Tensor]

    @classmethod
    def of(cls, work: Work, rows: MicroBatch, prepass: Mapping[str, PrepassResult], first: bool) -> LossInputs:
        """Collect them and copy them to the device at once."""
        # (what, of which) -> [T_b] for every rollout of the batch; `at_trained` takes the micro-batch's T tokens of
        # each.
        columns: dict[tuple[str, str], Sequence[np.ndarray]] = {("logprobs", BEHAVIOUR): work.behaviour}
        if work.advantage is not None:
            columns["advantage", "batch"] = work.advantage
        if work.objective.needs_reference:
            columns["logprobs", REFERENCE] = work.reference
        # On the first optimizer step the proximal policy is the current one, whose log-probs the forward pass gives.
        if not first:
            columns["logprobs", PROXIMAL] = work.behaviour
            # After the line before: with a correction or decoupled the recomputed log-probs replace the behaviour's.
            columns |= {(name, PROXIMAL): values for name, values in work.proximal.items()}
        columns |= {(name, WITHOUT_DROPOUT): values for name, values in work.without_dropout.items()}
        of_rollouts: dict[tuple[str, str], np.ndarray] = {}
        for component in work.objective.components:
            name = component.name
            result = prepass.get(component.name, PrepassResult())
            columns["weight", component.weights] = work.weights[component.weights]
            columns |= {("column", read): work.reads[read] for read in component.reads}
            if component.by_token:
                columns["factor", name] = work.batch.tokens(f"factor/{name}")
            if result.kept is not None:
                columns["kept", name] = result.kept
            if result.chosen is not None:
                columns["chosen", name] = result.chosen
            if result.sequence_losses is not None and result.logprob_gradients is not None:
                of_rollouts |= {
                    ("sequence_loss", name): result.sequence_losses,
                    ("logprob_gradient", name): result.logprob_gradients,
                }
            if name in work.group_weights:
                of_rollouts["group_weight", name] = work.group_weights[name]
        host = {key: rows.at_trained(values) for key, values in columns.items()}
        # [S], in the order of the micro-batch's rollouts.
        host |= {key: values[rows.index] for key, values in of_rollouts.items()}
        # A list, since entries are added on the way.
        for (what, weights), values in list(host.items()):
            if what == "weight":
                host |= _places(weights, values, host["logprobs", BEHAVIOUR])
        # One copy for all of them.
        device = dict(zip(host, to_device([*host.values()], rows.targets.device), strict=True))
        return cls(work.objective, rows, first, host, device)

    def statistics(self, computed: Statistics) -> Statistics:
        """Statistics of all models that the losses read, from those `computed` by the pass that has gradients."""
        statistics = dict(computed)
        for name, _ in computed:
            plain = self.device.get((name, WITHOUT_DROPOUT))
            if plain is not None:
                noisy = computed[name, CURRENT]
                # zero in value: dropout is in the gradient, and not in ratios, KL or mismatch
                statistics[name, CURRENT] = plain + (noisy - noisy.detach())
        if self.objective.needs_reference:
            statistics["logprobs", REFERENCE] = self.device["logprobs", REFERENCE]
        for name in self.objective.proximal_statistics:
            statistics[name, PROXIMAL] = self._proximal(name, statistics)
        return statistics

    def _proximal(self, name: str, statistics: Statistics) -> torch.Tensor:
        """[T]: a statistic of the policy that ratios are taken to."""
        if self.first:
            # So that the ratio is exactly 1 and its gradient is that of log pi.
            return statistics[name, CURRENT].detach()
        return self.device[name, PROXIMAL]

    def token_batch(self, component: ObjectiveTerm, statistics: Statistics) -> TokenBatch | None:
        """The tokens that the component trains; None without any. TrainingError where a ratio needs an unknown
        log-prob."""
        # int64 [N], among the micro-batch's T trained tokens: those that the component gives a weight.
        places = np.flatnonzero(self.host["weight", component.weights])
        if len(places) == 0:
            return None
        # The same on the device; None: all T.
        index = self.device.get(("places", component.weights))

        def on(values: torch.Tensor) -> torch.Tensor:
            # [T, ...] -> [N, ...]. By places, not by a mask, whose count the host would have to wait for.
            return values if index is None else values.index_select(0, index)

        if component.corrected:
            correction = self.objective.correction
        else:
            correction = None
        # In host memory, where NaN can be looked for without waiting for the device.
        self._refuse_unknown(component, places, corrected=correction is not None)
        name = component.name
        given = [what for what in ("kept", "factor", "chosen") if (what, name) in self.device]
        behaviour = self.device["logprobs", BEHAVIOUR]
        advantage = self.device.get(("advantage", "batch"))
        tokens = TokenBatch(
            sequence=on(self.rows.row),
            sequences=len(self.rows.index),
            weight=on(self.device["weight", component.weights]),
            group_weight=self.of_rollouts("group_weight", component, like=behaviour),
            advantage=on(torch.zeros_like(behaviour) if advantage is None else advantage),
            proximal_logprobs=on(self._proximal("logprobs", statistics)),
            behaviour_logprobs=on(behaviour),
            statistics={key: on(values) for key, values in statistics.items()},
            columns={read: on(self.device["column", read]) for read in component.reads},
            **{what: on(self.device[what, name]) for what in given},
        )
        if correction is None:
            return tokens
        # Last, because a correction reads the TokenBatch that it becomes a part of.
        return dataclasses.replace(tokens, importance=correction(tokens))

    def _refuse_unknown(self, component: ObjectiveTerm, places: np.ndarray, corrected: bool) -> None:
        """TrainingError when a log-prob that a ratio of these tokens needs is unknown (NaN)."""
        needed = []
        if PROXIMAL_LOGPROBS in component.loss.needs and not self.first:
            needed.append(self.host["logprobs", PROXIMAL][places])
        if corrected or BEHAVIOUR_LOGPROBS in component.loss.needs:
            needed.append(self.host["logprobs", BEHAVIOUR][places])
        if any(np.isnan(values).any() for values in needed):
            raise TrainingError(
                "a ratio needs behaviour log-probs, and some trained tokens have none: train such rollouts with one "
                "optimizer step per batch (updates_per_batch and epochs_per_batch 1) and algorithm.correction null"
            )

    def of_rollouts(self, what: str, component: ObjectiveTerm, like: torch.Tensor) -> torch.Tensor | None:
        """[S] in the type of `like`; None where the component has none."""
        values = self.device.get((what, component.name))
        if values is None:
            return None
        return values.to(like.dtype)


def _places(weights: str, weight: np.ndarray, behaviour: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    """Positions where the weight [T] is not 0, and which of these tokens have a known behaviour log-prob; each left out
    where it is all."""
    places = np.flatnonzero(weight)
    # Places among the component's own tokens, since add_mismatch reads its TokenBatch.
    known = np.flatnonzero(~np.isnan(behaviour[places]))
    positions = {}
    if len(places) < len(weight):
        positions["places", weights] = places
    if len(known) < len(places):
        positions["known", weights] = known
    return positions
