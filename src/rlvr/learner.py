"""One scored batch -> optimizer steps.

The batch is cut by whole groups into optimizer steps, and each of those into micro-batches. Invariants:
- The gradient of an optimizer step does not depend on the micro-batches: denominators are counted once, over the whole
  step and all ranks, before the first forward pass (N1).
- On a batch's first optimizer step the proximal log-probs are the detached current ones, so the ratio is exactly 1 and no
  extra pass is made; later steps use the behaviour log-probs (N2).
- Rollouts that can have no gradient cost no forward and no backward, but count in every denominator.
- A loss or gradient that is not finite skips its optimizer step and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.distributed import Backend
from rlvr.errors import TrainingError
from rlvr.losses import Denominators, Objective, TokenBatch
from rlvr.monitor.averages import Averages, is_maximum
from rlvr.needs import CURRENT, PROXIMAL, REFERENCE, Need
from rlvr.policy import MicroBatch, Snapshot, cut, forward, rows_of
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
        averages = Averages()
        trains = objective.trains(batch)
        with self.policy.training():
            if any(need.model == REFERENCE for need in objective.needs):
                self._add_reference_logprobs(batch, objective, trains, config)
            first = True
            for _ in range(config.epochs_per_batch):
                for part in _by_whole_groups(batch, config.updates_per_batch):
                    averages.update(self._optimizer_step(batch, part, trains, objective, config, lr, first))
                    first = False
        means = averages.means()
        tokens = int(sum(mask.sum() for mask, on in zip(_trained_tokens(batch, objective), trains, strict=True) if on))
        return {**means, "lr": lr, "tokens/trained": tokens}

    def _optimizer_step(
        self,
        batch: Batch,
        part: np.ndarray,
        trains: np.ndarray,
        objective: Objective,
        config: OptimConfig,
        lr: float,
        first: bool,
    ) -> dict[str, tuple[float, float]]:
        """Gradients of the rollouts in `part` and one step; metrics as (sum, weight) pairs."""
        over = self.backend.total(objective.denominators(batch.select(part)))
        averages, losses = Averages(), {component.name: 0.0 for component in objective.components}
        self.backend.zero()
        for rows in self._micro_batches(batch, part[trains[part]], objective, config):
            loss = self._backward(batch, rows, objective, over, first, averages, losses)
            if not math.isfinite(loss):
                averages.add("skipped/nonfinite", 1.0)
                return averages.pairs()
        norm = self.backend.step(lr, config.max_grad_norm)
        if not math.isfinite(norm):
            averages.add("skipped/nonfinite", 1.0)
            return averages.pairs()
        averages.add("skipped/nonfinite", 0.0)
        averages.add("grad_norm", norm)
        for component in objective.components:
            averages.add(f"loss/{component.name}", losses[component.name])
        averages.add("loss/total", sum(c.factor * losses[c.name] for c in objective.components))
        return averages.pairs()

    def _backward(
        self,
        batch: Batch,
        rows: MicroBatch,
        objective: Objective,
        over: dict[str, Denominators],
        first: bool,
        averages: Averages,
        losses: dict[str, float],
    ) -> float:
        """Add one micro-batch's gradients, its metrics and its share of each loss; the share of the total."""
        statistics = forward(self.policy, rows, [*objective.needs, Need("entropy")])
        if ("logprobs", REFERENCE) in {(n.statistic, n.model) for n in objective.needs}:
            statistics["logprobs", REFERENCE] = rows.gather(batch.token_columns[f"logprobs/{REFERENCE}"])
        logprobs = statistics["logprobs", CURRENT]
        behaviour = rows.gather([r.behaviour_logprobs for r in batch.rollouts])
        proximal = logprobs.detach() if first else behaviour
        has_advantage = "advantage" in batch.columns or "advantage" in batch.token_columns
        advantage = rows.gather(batch.tokens("advantage")) if has_advantage else torch.zeros_like(behaviour)

        total = torch.zeros((), device=logprobs.device)
        for component in objective.components:
            weight = rows.gather(batch.tokens(f"weight/{component.weights}"))
            on = weight != 0
            if not bool(on.any()):
                continue
            has_ratio = Need("logprobs", PROXIMAL) in component.loss.needs
            if has_ratio and not first and bool(proximal[on].isnan().any()):
                raise TrainingError(
                    "a ratio needs behaviour log-probs, and some trained tokens have none: train such rollouts with one "
                    "optimizer step per batch (updates_per_batch and epochs_per_batch 1)"
                )
            tokens = TokenBatch(
                rows.row[on],
                len(rows.index),
                weight[on],
                advantage[on],
                proximal[on],
                behaviour[on],
                {key: values[on] for key, values in statistics.items()},
            )
            term = component.loss(tokens, over[component.name])
            losses[component.name] += float(term.value.detach())
            total = total + component.factor * term.value
            _add_metrics(averages, term.metrics, weight[on])
            if component is objective.components[0]:
                _add_metrics(averages, {"entropy": tokens.entropy.detach()}, weight[on])
                if first:
                    _add_mismatch(averages, (tokens.logprobs - tokens.behaviour_logprobs).detach())
        loss = float(total.detach())
        if math.isfinite(loss) and total.requires_grad:
            self.backend.backward(total)
        return loss

    def _micro_batches(
        self, batch: Batch, index: np.ndarray, objective: Objective, config: OptimConfig
    ) -> Iterator[MicroBatch]:
        trained = _trained_tokens(batch, objective)
        lengths = np.asarray([len(batch.rollouts[i]) for i in index], dtype=np.int64)
        pad_id = int(self.policy.tokenizer.pad_token_id or 0)  # type: ignore[arg-type]
        for part in cut(lengths, config.micro_batch_size, config.micro_batch_tokens):
            yield rows_of(batch, index[part], trained, pad_id, self.policy.device)

    def _add_reference_logprobs(
        self, batch: Batch, objective: Objective, trains: np.ndarray, config: OptimConfig
    ) -> None:
        """The token column `logprobs/reference`, NaN where nothing is trained; one pass for all optimizer steps."""
        assert self.reference is not None, "a component asks for the reference and the stage keeps none"
        columns = [np.full(len(r), np.nan, dtype=np.float32) for r in batch.rollouts]
        with self.reference.in_place(), torch.no_grad():
            for rows in self._micro_batches(batch, np.flatnonzero(trains), objective, config):
                rows.scatter(forward(self.policy, rows, [Need("logprobs")])["logprobs", CURRENT], columns)
        batch.token_columns[f"logprobs/{REFERENCE}"] = columns


def _by_whole_groups(batch: Batch, parts: int) -> list[np.ndarray]:
    """Positions of the rollouts of each optimizer step; every group is whole in one of them, none is empty."""
    groups = batch.group_index()
    count = int(groups.max()) + 1 if len(groups) else 0
    chunks = np.array_split(np.arange(count), min(parts, count)) if count else []
    return [np.flatnonzero(np.isin(groups, chunk)) for chunk in chunks]


def _trained_tokens(batch: Batch, objective: Objective) -> list[np.ndarray]:
    """bool [T_b] per rollout: the tokens that any component gives a weight."""
    columns = [batch.tokens(f"weight/{name}") for name in dict.fromkeys(c.weights for c in objective.components)]
    return [np.any([weight != 0 for weight in weights], axis=0) for weights in zip(*columns, strict=True)]


def _add_metrics(averages: Averages, metrics: dict[str, torch.Tensor], weight: torch.Tensor) -> None:
    for name, values in metrics.items():
        if is_maximum(name):
            averages.add(name, float(values.max()))
        else:
            averages.add(name, float((weight * values).sum()), float(weight.sum()))


def _add_mismatch(averages: Averages, gap: torch.Tensor) -> None:
    """The gap between proximal and behaviour log-probs [T], over the tokens whose behaviour log-prob is known."""
    known = ~gap.isnan()
    if not bool(known.any()):
        return
    size, count = gap[known].abs(), float(known.sum())
    averages.add("mismatch/mean", float(size.sum()), count)
    averages.add("mismatch/max", float(size.max()))
    averages.add("mismatch/share_over", float((size > GATE).sum()), count)
