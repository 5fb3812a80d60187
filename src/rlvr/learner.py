"""One scored batch -> optimizer steps.

The batch is cut by whole groups into optimizer steps, and each of those into micro-batches. Invariants:
- The gradient of an optimizer step does not depend on the micro-batches: denominators are counted once, over the whole
  step and all ranks, before the first forward pass (N1).
- On a batch's first optimizer step the proximal log-probs are the detached current ones, so the ratio is exactly 1 and no
  extra pass is made; later steps use the behaviour log-probs, or, where the objective is decoupled, those of one pass
  made before the first step (N2).
- A correction weighs tokens by proximal over behaviour probability; it never counts in a denominator.
- Rollouts that can have no gradient cost no forward and no backward, but count in every denominator.
- A loss or gradient that is not finite skips its optimizer step and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.distributed import Backend
from rlvr.errors import TrainingError
from rlvr.losses import Denominators, Objective, TokenBatch
from rlvr.losses.correction import Level, gaps, ratios
from rlvr.monitor.averages import Averages, is_maximum
from rlvr.needs import CURRENT, PROXIMAL, REFERENCE, Need
from rlvr.policy import MicroBatch, Snapshot, forward, micro_batches
from rlvr.records import Batch

GATE = 0.1
"""Nats: a gap between proximal and behaviour log-probs over this is counted in `mismatch/share_over`."""


class Learner:
    """Turns scored batches into optimizer steps of one backend's policy."""

    def __init__(self, backend: Backend, reference: Snapshot | None = None) -> None:
        self.backend = backend
        self.policy = backend.policy
        self.reference = reference

    def update(self, batch: Batch, objective: Objective, config: OptimConfig, lr: float) -> dict[str, float | None]:
        """Take the optimizer steps of one batch; their metrics, averaged over them.

        The batch needs the token columns `weight/<name>` of every component, and `advantage` where a component reads it.
        """
        averages, work, first = Averages(), _Work.of(batch, objective, config), True
        parts = _by_whole_groups(batch, config.updates_per_batch) * config.epochs_per_batch
        with self.policy.training():
            if objective.needs_reference:
                self._add_reference_logprobs(work)
            if objective.decoupled and len(parts) > 1:
                self._add_proximal_logprobs(work, np.unique(np.concatenate(parts[1:])))
            for part in parts:
                averages.update(self._optimizer_step(work, part, lr, first))
                first = False
        tokens = sum(int(mask.sum()) for mask, on in zip(work.trained, work.trains, strict=True) if on)
        return {**_with_effective_size(averages.means()), "lr": lr, "tokens/trained": tokens}

    def _optimizer_step(self, work: _Work, part: np.ndarray, lr: float, first: bool) -> dict[str, tuple[float, float]]:
        """Gradients of the rollouts in `part` and one step; metrics as (sum, weight) pairs."""
        components = work.objective.components
        over = self.backend.total(work.objective.denominators(work.batch.select(part)))
        averages, losses = Averages(), {component.name: 0.0 for component in components}
        self.backend.zero()
        for rows in self._micro_batches(work, part[work.trains[part]]):
            loss = self._backward(work, rows, over, first, averages, losses)
            if not math.isfinite(loss):
                averages.add("skipped/nonfinite", 1.0)
                return averages.pairs()
        norm = self.backend.step(lr, work.config.max_grad_norm)
        if not math.isfinite(norm):
            averages.add("skipped/nonfinite", 1.0)
            return averages.pairs()
        averages.add("skipped/nonfinite", 0.0)
        averages.add("grad_norm", norm)
        for component in components:
            averages.add(f"loss/{component.name}", losses[component.name])
        averages.add("loss/total", sum(c.factor * losses[c.name] for c in components))
        return averages.pairs()

    def _backward(
        self,
        work: _Work,
        rows: MicroBatch,
        over: dict[str, Denominators],
        first: bool,
        averages: Averages,
        losses: dict[str, float],
    ) -> float:
        """Add one micro-batch's gradients, its metrics and its share of each loss; the share of the total."""
        objective = work.objective
        statistics = forward(self.policy, rows, [*objective.needs, Need("entropy")])
        if objective.needs_reference:
            statistics["logprobs", REFERENCE] = rows.gather(work.reference)
        logprobs = statistics["logprobs", CURRENT]
        behaviour = rows.gather(work.behaviour)
        proximal = logprobs.detach() if first else rows.gather(work.proximal) if work.proximal else behaviour
        advantage = torch.zeros_like(behaviour) if work.advantage is None else rows.gather(work.advantage)

        total = torch.zeros((), device=logprobs.device)
        for component in objective.components:
            weight = rows.gather(work.weights[component.weights])
            on = weight != 0
            if not bool(on.any()):
                continue
            correction = objective.correction if component.corrected else None
            has_ratio = Need("logprobs", PROXIMAL) in component.loss.needs and not first
            _refuse_unknown(proximal[on] if has_ratio else None, behaviour[on] if correction else None)
            tokens = TokenBatch(
                rows.row[on],
                len(rows.index),
                weight[on],
                advantage[on],
                proximal[on],
                behaviour[on],
                {key: values[on] for key, values in statistics.items()},
            )
            tokens.importance = None if correction is None else correction(tokens)
            term = component.loss(tokens, over[component.name])
            losses[component.name] += float(term.value.detach())
            total = total + component.factor * term.value
            _add_metrics(averages, term.metrics, weight[on])
            if component is objective.components[0]:
                _add_metrics(averages, {"entropy": tokens.entropy.detach()}, weight[on])
                if first or work.proximal:
                    _add_mismatch(averages, tokens, getattr(objective.correction, "level", "token"))
        loss = float(total.detach())
        if math.isfinite(loss) and total.requires_grad:
            self.backend.backward(total)
        return loss

    def _micro_batches(self, work: _Work, index: np.ndarray) -> Iterator[MicroBatch]:
        return micro_batches(self.policy, work.batch, index, work.trained, work.config)

    def _add_reference_logprobs(self, work: _Work) -> None:
        """The token column `logprobs/reference`, NaN where nothing is trained; one pass for all optimizer steps."""
        assert self.reference is not None, "a component asks for the reference and the stage keeps none"
        with self.reference.in_place():
            work.reference = self._logprobs(work, np.flatnonzero(work.trains))
        work.batch.token_columns[f"logprobs/{REFERENCE}"] = work.reference

    def _add_proximal_logprobs(self, work: _Work, index: np.ndarray) -> None:
        """The token column `logprobs/proximal` of these rollouts, under the weights as they are now."""
        work.proximal = self._logprobs(work, index[work.trains[index]])
        work.batch.token_columns[f"logprobs/{PROXIMAL}"] = work.proximal

    def _logprobs(self, work: _Work, index: np.ndarray) -> list[np.ndarray]:
        """Log-probs of the trained tokens of these rollouts, NaN elsewhere; float32 [T_b] for every rollout of the batch."""
        values = [np.full(len(r), np.nan, dtype=np.float32) for r in work.batch.rollouts]
        with torch.no_grad():
            for rows in self._micro_batches(work, index):
                rows.scatter(forward(self.policy, rows, [Need("logprobs")])["logprobs", CURRENT], values)
        return values


@dataclass
class _Work:
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
    advantage: list[np.ndarray] | None
    reference: list[np.ndarray] = field(default_factory=list)
    proximal: list[np.ndarray] = field(default_factory=list)
    """Empty where the ratio is taken to the behaviour policy."""

    @classmethod
    def of(cls, batch: Batch, objective: Objective, config: OptimConfig) -> _Work:
        """The work on `batch`."""
        weights = {c.weights: batch.tokens(f"weight/{c.weights}") for c in objective.components}
        return cls(
            batch,
            objective,
            config,
            trains=objective.trains(batch),
            weights=weights,
            trained=[np.any([w != 0 for w in of_one], axis=0) for of_one in zip(*weights.values(), strict=True)],
            behaviour=[r.behaviour_logprobs for r in batch.rollouts],
            advantage=batch.tokens("advantage") if batch.has("advantage") else None,
        )


def _by_whole_groups(batch: Batch, parts: int) -> list[np.ndarray]:
    """Positions of the rollouts of each optimizer step; every group is whole in one of them, none is empty."""
    groups = batch.group_index()
    count = int(groups.max()) + 1 if len(groups) else 0
    chunks = np.array_split(np.arange(count), min(parts, count)) if count else []
    return [np.flatnonzero(np.isin(groups, chunk)) for chunk in chunks]


def _add_metrics(averages: Averages, metrics: dict[str, torch.Tensor], weight: torch.Tensor) -> None:
    for name, values in metrics.items():
        if is_maximum(name):
            averages.add(name, float(values.max()))
        else:
            averages.add(name, float((weight * values).sum()), float(weight.sum()))


def _refuse_unknown(*needed: torch.Tensor | None) -> None:
    """TrainingError when a log-prob that a ratio needs is unknown (NaN)."""
    if any(values is not None and bool(values.isnan().any()) for values in needed):
        raise TrainingError(
            "a ratio needs behaviour log-probs, and some trained tokens have none: train such rollouts with one optimizer "
            "step per batch (updates_per_batch and epochs_per_batch 1) and algorithm.correction null"
        )


def _add_mismatch(averages: Averages, tokens: TokenBatch, level: Level) -> None:
    """The gap between proximal and behaviour log-probs, over the tokens whose behaviour log-prob is known.

    `level` is that of the ratios which the correction bounds.
    """
    gap = gaps(tokens)
    known = ~gap.isnan()
    if not bool(known.any()):
        return
    size, ratio, count = gap[known].abs(), gap[known].exp(), float(known.sum())
    averages.add("mismatch/mean", float(size.sum()), count)
    averages.add("mismatch/max", float(size.max()))
    averages.add("mismatch/share_over", float((size > GATE).sum()), count)
    averages.add("mismatch/kl", float((ratio - 1 - gap[known]).sum()), count)
    averages.add("ratio_to_behaviour", float(ratio.sum()), count)
    averages.add("ratio_to_behaviour_squared", float(ratio.square().sum()), count)
    if tokens.importance is not None:
        averages.add("correction/weight", float(tokens.importance.sum()), count)
        averages.add("correction/touched", float((tokens.importance != ratios(tokens, level)).sum()), count)


def _with_effective_size(means: dict[str, float | None]) -> dict[str, float | None]:
    """The step's metrics with the share of tokens that the importance weights leave effective (Kish 1965)."""
    first, second = means.pop("ratio_to_behaviour", None), means.pop("ratio_to_behaviour_squared", None)
    return means | {"mismatch/effective": first * first / second if first and second else None}
