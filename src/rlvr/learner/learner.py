"""One scored batch -> optimizer steps.

The batch is cut by whole groups into optimizer steps, and each of those into micro-batches. Invariants:
- The gradient of an optimizer step does not depend on the micro-batches: denominators are counted once, over the whole
  step and all ranks, before the first forward pass (N1).
- On a batch's first optimizer step the proximal log-probs are the detached current ones, so the ratio is exactly 1 and
  no extra pass is made; later steps use the behaviour log-probs, or, where the objective has a correction or is
  decoupled, those of one pass made before the first step (N2).
- Losses that compare tokens or responses of the whole optimizer step see it in one pass without gradient before it is
  cut.
- A correction weighs tokens by proximal over behaviour probability, the same in every optimizer step of the batch; it
  never counts in a denominator.
- Passes without gradient are made in evaluation mode. An adapter's dropout is in the pass that has gradients alone, and
  changes the gradient but no value: statistics come from a pass without it, one more in each optimizer step.
- Rollouts that can have no gradient cost no forward and no backward, but count in every denominator.
- A loss or gradient that is not finite skips its optimizer step and is counted.
- Within an optimizer step the host does not wait for the device: metrics and losses are fetched once, at its end, and
  what depends on data (which tokens a component trains, which log-probs are known) is found in host memory.
- Every rank holds the whole batch and computes its share of each optimizer step; the same is said of the step on every
  rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.core.needs import CURRENT, ENTROPY, LOGPROBS, LOGPROBS_WITH_GRADIENT, PROXIMAL, REFERENCE, Need, Statistic
from rlvr.distributed import Backend, World
from rlvr.learner.inputs import LossInputs, Work
from rlvr.losses import Denominators, LossTerm, Objective, ObjectiveTerm, SequenceLoss, TokenBatch
from rlvr.losses.objective import Averages, StepMetrics, is_maximum, mismatch_sums, with_effective_size
from rlvr.losses.prepass import PrepassResult, prepass_statistics
from rlvr.losses.tokens import LARGEST_LOG_RATIO
from rlvr.policy import MicroBatch, Snapshot, forward, micro_batches
from rlvr.policy.flops import ModelFlops, UpdateFlops
from rlvr.policy.load_balancing import deal
from rlvr.policy.microbatch import ComputedPass, Cost, token_limit
from rlvr.policy.statistics import DeferredColumns
from rlvr.records import Batch

WITHOUT_GRADIENT = 8
"""Rollouts without a gradient whose mismatch is measured in a step: a wrong engine shows in any of them, and eight cost
little."""
GROUPS_PER_RANK = 2
"""With fewer groups in an optimizer step than this for each rank, groups are cut, or ranks would wait for each
other."""


class Learner:
    """Turns scored batches into optimizer steps of one backend's policy."""

    def __init__(self, backend: Backend, reference: Snapshot | None = None, world: World | None = None) -> None:
        self.backend = backend
        self.policy = backend.policy
        self.reference = reference
        self.world = world or World()
        self.model_flops = ModelFlops.of(self.policy)
        self._passes_made: list[ComputedPass] = []
        """Those of the last update on this rank."""

    def update(self, batch: Batch, objective: Objective, config: OptimConfig, lr: float) -> dict[str, float | None]:
        """Take the optimizer steps of one batch; their metrics, averaged over them.

        The batch needs the token columns `weight/<name>` of every component, and `advantage` where a component reads
        it.
        """
        averages = Averages()
        work = Work.of(batch, objective, config)
        first = True
        # One int64 array of positions for each optimizer step; an epoch repeats all of them.
        parts = _by_whole_groups(batch, config.updates_per_batch) * config.epochs_per_batch
        self._passes_made.clear()
        with self.policy.training():
            if objective.needs_reference:
                self._add_reference_logprobs(work)
            # The first part needs none: there the current policy is the one that the update began with.
            if objective.recalls_update and len(parts) > 1:
                self._add_proximal_statistics(work, np.unique(np.concatenate(parts[1:])))
            # Before the first step, while the weights are those that the rollouts are compared with.
            flat = self._log_ratios_without_gradient(work)
            for part in parts:
                averages.update(self._optimizer_step(work, part, lr, first))
                first = False
            if objective.renewal is not None and self.reference is not None:
                # After the last step: within a batch every step is compared with the same reference.
                self.reference.follow(objective.renewal.mix)
        tokens = sum(int(mask.sum()) for mask, on in zip(work.trained, work.trains, strict=True) if on)
        each = self._weight_without_gradient(work, averages, len(flat))
        # A mean takes sum and count times `each`; a maximum is one value, whatever its weight.
        for name, total in mismatch_sums(flat).items():
            weight = 1.0 if is_maximum(name) else each
            averages.add(name, weight * float(total), 1.0 if is_maximum(name) else each * len(flat))
        skipped, planned = averages.pairs().get("skipped/nonfinite", (0.0, 0.0))
        taken = {"update/steps": int(planned - skipped), "tokens/trained": tokens, "lr": lr}
        return with_effective_size(averages.means()) | taken

    @property
    def computed(self) -> UpdateFlops:
        """Return the FLOPs of the last update's passes on this rank, counted when it is asked for."""
        return self.model_flops.of_update(self._passes_made)

    def _optimizer_step(self, work: Work, part: np.ndarray, lr: float, first: bool) -> dict[str, tuple[float, float]]:
        """Gradients of the rollouts in `part` and one step; metrics as (sum, weight) pairs, the same on every rank."""
        components = work.objective.components
        index = part[work.trains[part]]
        # Of the whole part, rollouts without a gradient too: leaving them out would make the others' share larger.
        over = work.objective.denominators(work.batch.select(part))
        metrics = StepMetrics()
        updated = DeferredColumns()
        if self.policy.adapter_dropout:
            # Under the weights of this step, at which the loss is differentiated.
            read: set[Statistic] = {need.statistic for need in work.objective.needs if need.model == CURRENT}
            read |= {"logprobs", "entropy"}
            work.without_dropout = self._statistics(work, index, [Need(name) for name in sorted(read)])
        prepass = self._prepass(work, part, first)
        self.backend.zero()
        for rows in self._passes(work, self._share(work.batch, index)):
            if rows is None:
                # Under ZeRO-3 weights are gathered in forward and backward passes, by all ranks together: a rank that
                # has no micro-batch left computes a loss of 0 with the others, or they would wait for it.
                self.backend.backward(self._nothing(work, index))
            else:
                self._backward(work, rows, over, prepass, first, metrics, updated)
        # One copy for all micro-batches, after the last backward pass was started.
        updated.write()
        own = metrics.fetch([component.name for component in components])
        everything = Averages()
        total = dict.fromkeys(own.losses, 0.0)
        finite = True
        # Every rank has to decide alike whether to step: one loss that is not finite anywhere skips the step
        # everywhere.
        gathered = self.world.gather((own.averages.pairs(), own.losses, own.finite), "the losses")
        for of_rank, losses_of_rank, fine in gathered:
            everything.update(of_rank)
            total = {name: total[name] + loss for name, loss in losses_of_rank.items()}
            finite = finite and fine
        if finite:
            norm = self.backend.step(lr, work.config.max_grad_norm)
        else:
            # Not stepped; the next `zero` drops the gradients.
            norm = math.nan
        if not math.isfinite(norm):
            skipped = Averages()
            skipped.add("skipped/nonfinite", 1.0)
            return skipped.pairs()
        everything.add("skipped/nonfinite", 0.0)
        everything.add("grad_norm", norm)
        for component in components:
            everything.add(f"loss/{component.name}", total[component.name])
        everything.add("loss/total", sum(c.coef * total[c.name] for c in components))
        return everything.pairs()

    def _backward(
        self,
        work: Work,
        rows: MicroBatch,
        over: dict[str, Denominators],
        prepass: dict[str, PrepassResult],
        first: bool,
        metrics: StepMetrics,
        updated: DeferredColumns,
    ) -> None:
        """Add one micro-batch's gradients, its metrics and its share of each loss.

        A loss that is not finite is differentiated too, because the host does not know it before the end of the
        optimizer step, which is skipped then.
        """
        objective = work.objective
        # Before the forward pass, so that the copies are queued when it begins.
        inputs = LossInputs.of(work, rows, prepass, first)
        # (statistic, "current") -> [T] at the micro-batch's trained tokens.
        computed = forward(self.policy, rows, [*objective.needs, LOGPROBS, ENTROPY])
        self._passes_made.append(rows.computed(grad=True))
        statistics = inputs.statistics(computed)
        logprobs = statistics["logprobs", CURRENT]
        updated.add(rows, logprobs, work.updated)

        # []: sum over components of coef x this micro-batch's share of the loss.
        total = torch.zeros((), device=logprobs.device)
        for component in objective.components:
            tokens = inputs.token_batch(component, statistics)
            if tokens is None:
                continue
            term = _term(component, tokens, over[component.name], inputs)
            metrics.add_loss(component.name, term.value)
            total = total + component.coef * term.value
            metrics.add_values(term.metrics, tokens.weight)
            # Entropy and mismatch are of the tokens of the first component alone (the policy loss), or tokens would
            # count twice.
            if component is objective.components[0]:
                metrics.add_values({"entropy/trained": tokens.entropy.detach()}, tokens.weight)
                if first or work.proximal:
                    known_places = inputs.device.get(("known", component.weights))
                    metrics.add_mismatch(tokens, known_places, objective.correction)
        metrics.add_total(total)
        if total.requires_grad:
            self.backend.backward(total)
        # No component had a token here, but the other ranks are in a backward pass that is collective.
        elif self.backend.lockstep:
            nothing: Any = sum(0.0 * s.sum() for s in statistics.values() if s.requires_grad)
            self.backend.backward(nothing)

    def _passes(
        self, work: Work, share: np.ndarray, where: list[np.ndarray] | None = None
    ) -> Iterator[MicroBatch | None]:
        """The micro-batches of this rank's share; None, where ranks go in lockstep, until all have had as many.

        `where`: the tokens that are computed, bool [T_b] each; None: those that are trained.
        """
        own = micro_batches(self.policy, work.batch, share, where or work.trained, work.config)
        if not self.backend.lockstep:
            yield from own
            return
        rows = list(own)
        # before the first pass, which is collective
        most = max(self.world.gather(len(rows), "the number of micro-batches"))
        yield from rows
        yield from [None] * (most - len(rows))

    def _share(self, batch: Batch, index: np.ndarray) -> np.ndarray:
        """This rank's rollouts among those at `index`: whole groups, whose prompt is computed once, where there are
        enough groups to balance the ranks with."""
        if self.world.size == 1:
            return index
        costs = Cost.of(self.policy).alone(np.asarray([len(batch.rollouts[i]) for i in index], dtype=np.int64))
        units = batch.select(index).group_index()
        # Too few groups to balance: units are single rollouts, and shared prompts are computed once per rank instead.
        if len(index) == 0 or int(units.max()) + 1 < GROUPS_PER_RANK * self.world.size:
            units = np.arange(len(index))
        # Every rank computes the whole deal from the same costs and takes its own hand.
        own = deal(np.bincount(units, weights=costs), self.world.size)[self.world.rank]
        return index[np.isin(units, own)]

    def _nothing(self, work: Work, index: np.ndarray, where: list[np.ndarray] | None = None) -> torch.Tensor:
        """A loss of 0 over the shortest of these rollouts, for a rank that has no more micro-batches than others
        have."""
        shortest = index[[int(np.argmin([len(work.batch.rollouts[i]) for i in index]))]]
        (rows,) = micro_batches(self.policy, work.batch, shortest, where or work.trained, work.config)
        # Times 0.0, so that gradients are zeros and not absent: hooks that reduce them run all the same.
        return 0.0 * forward(self.policy, rows, [LOGPROBS_WITH_GRADIENT])["logprobs", CURRENT].sum()

    def _prepass(self, work: Work, part: np.ndarray, first: bool) -> dict[str, PrepassResult]:
        """Return the results of the components that have to see the whole optimizer step; one pass without gradient if
        there are any."""
        asking = work.objective.shown_the_step
        if not asking:
            return {}
        needs = frozenset().union(*(c.needs_of_step for c in asking), {LOGPROBS})
        # bool [components, B] -> [B]
        has_weight = np.any([[bool((w != 0).any()) for w in work.weights[c.weights]] for c in asking], axis=0)
        index = part[has_weight[part]]
        current = self._statistics(work, index, [need for need in needs if need.model == CURRENT])
        columns = {(name, CURRENT): values for name, values in current.items()}
        # Recomputed where the objective asks for it, else those recorded while sampling.
        recalled = work.proximal.get("logprobs", work.behaviour)
        columns["logprobs", PROXIMAL] = columns["logprobs", CURRENT] if first else recalled
        if work.reference:
            columns["logprobs", REFERENCE] = work.reference
        return {c.name: prepass_statistics(c, work.batch, index, columns, work.weights[c.weights]) for c in asking}

    def _add_reference_logprobs(self, work: Work) -> None:
        """The token column `logprobs/reference`, NaN where nothing is trained; one pass for all optimizer steps."""
        assert self.reference is not None, "a component asks for the reference and the stage keeps none"
        with self.reference.in_place():
            work.reference = self._statistics(work, np.flatnonzero(work.trains), [LOGPROBS])["logprobs"]
        work.batch.token_columns[f"logprobs/{REFERENCE}"] = work.reference

    def _add_proximal_statistics(self, work: Work, index: np.ndarray) -> None:
        """The token columns `STATISTIC/proximal` of these rollouts, log-probs among them, under the weights as they are
        now."""
        needs = [LOGPROBS, *(Need(name) for name in work.objective.proximal_statistics)]
        work.proximal = self._statistics(work, index[work.trains[index]], needs)
        work.batch.token_columns |= {f"{name}/{PROXIMAL}": values for name, values in work.proximal.items()}

    def _log_ratios_without_gradient(self, work: Work) -> torch.Tensor:
        """Log-ratios [N] of the proximal to the behaviour policy at sampled tokens of some rollouts that have no
        gradient; one micro-batch.

        Without them the mismatch would be of groups with an advantage alone, and unknown where there is none (N3).
        """
        index = _measured_without_gradient(work)
        if len(index) == 0:
            return torch.empty(0)
        proximal = self._statistics(work, index, [LOGPROBS], work.known)["logprobs"]
        # log pi_proximal - log pi_behaviour at known tokens, [N] over the rollouts.
        log_ratios = [(proximal[i] - work.behaviour[i])[work.known[i]] for i in index]
        return torch.from_numpy(np.concatenate(log_ratios)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)

    def _weight_without_gradient(self, work: Work, averages: Averages, measured: int) -> float:
        """The weight of a token measured without gradient, so that both kinds count in `mismatch/*` by their tokens.

        Tokens with a gradient count once for each optimizer step in which their mismatch is known (their number is in
        `averages`); those without count as if they were all measured, and as often as one with a gradient.
        """
        known_counts = np.asarray([int(tokens.sum()) for tokens in work.known], dtype=np.float64)
        live = float(known_counts[work.trains].sum())
        flat = float(known_counts[~work.trains].sum())
        counted = averages.pairs().get("mismatch/mean", (0.0, 0.0))[1]
        # Optimizer steps in which a known token was counted, on average.
        times = counted / live if live and counted else 1.0
        return times * flat / measured if measured else 0.0

    def _statistics(
        self, work: Work, index: np.ndarray, needs: Sequence[Need], where: list[np.ndarray] | None = None
    ) -> dict[str, list[np.ndarray]]:
        """Statistics of tokens of these rollouts under the weights in place, NaN elsewhere, without gradient.

        By name, float32 [T_b] for every rollout of the batch, at the tokens that `where` marks (None: those that are
        trained).
        """
        token_columns: dict[str, list[np.ndarray]] = {
            need.statistic: [np.full(len(r), np.nan, dtype=np.float32) for r in work.batch.rollouts] for need in needs
        }
        share = self._share(work.batch, index)
        later = DeferredColumns()
        # Evaluation mode: an adapter's dropout is in the pass that has gradients alone.
        with torch.no_grad(), self.policy.evaluating():
            for rows in self._passes(work, share, where):
                if rows is None:
                    self._nothing(work, index, where)
                    continue
                statistics = forward(self.policy, rows, needs)
                self._passes_made.append(rows.computed(grad=False))
                for name, values in token_columns.items():
                    later.add(rows, statistics[name, CURRENT], values)
        later.write()
        own = {int(i): {name: values[i] for name, values in token_columns.items()} for i in share}
        # float32 columns survive the exchange exactly, so ranks go on with the same numbers.
        for of_rank in self.world.gather(own, "statistics of the tokens"):
            for i, of_one in of_rank.items():
                for name, values in of_one.items():
                    token_columns[name][i] = values
        return token_columns


def _term(component: ObjectiveTerm, tokens: TokenBatch, over: Denominators, inputs: LossInputs) -> LossTerm:
    """The component's share of the loss for the tokens of a micro-batch, with its prepass result of the whole step."""
    losses = inputs.of_rollouts("sequence_loss", component, like=tokens.logprobs)
    gradients = inputs.of_rollouts("logprob_gradient", component, like=tokens.logprobs)
    if losses is not None and gradients is not None:
        # [S] log pi(y), with gradient. Its own value is taken off again, so that the term's value is that of the losses
        # and its gradient is g_i grad log pi(y_i).
        sums = tokens.sum_by_sequence(tokens.weight * tokens.logprobs)
        return LossTerm(losses.sum() + (gradients * (sums - sums.detach())).sum())
    assert not isinstance(component.loss, SequenceLoss)
    term = component.loss(tokens, over)
    if tokens.kept is None:
        return term
    return LossTerm(term.value, term.metrics | {"tokens/kept": tokens.kept})


def _by_whole_groups(batch: Batch, parts: int) -> list[np.ndarray]:
    """Positions of the rollouts of each optimizer step; every group is whole in one of them, none is empty."""
    groups = batch.group_index()
    count = int(groups.max()) + 1 if len(groups) else 0
    if count:
        # At most as many parts as groups: an empty optimizer step would be one of weight decay alone.
        chunks = np.array_split(np.arange(count), min(parts, count))
    else:
        chunks = []
    return [np.flatnonzero(np.isin(groups, chunk)) for chunk in chunks]


def _measured_without_gradient(work: Work) -> np.ndarray:
    """Positions of the rollouts without a gradient that are measured: one of every group, then another, to a
    micro-batch."""
    able = [int(i) for i in np.flatnonzero(~work.trains) if work.known[i].any()]
    able.sort(key=lambda i: work.batch.rollouts[i].token_ids.tobytes())  # whatever the order in the batch (N4)
    flat = np.asarray(able, dtype=np.int64)
    seen: dict[int, int] = {}
    turns = []
    for group in work.batch.group_index()[flat]:
        # How many of the group came before; sorted by it, every group gives one rollout before any gives its second.
        turns.append(seen.get(int(group), 0))
        seen[int(group)] = turns[-1] + 1
    index = flat[np.argsort(turns, kind="stable")][: min(WITHOUT_GRADIENT, work.config.micro_batch_size or len(flat))]
    if (limit := token_limit(work.config)) is not None:
        # At least one rollout, also where it alone is over the budget.
        used = np.cumsum([len(work.batch.rollouts[i]) for i in index])
        index = index[: max(1, int((used <= limit).sum()))]
    return np.sort(index)
