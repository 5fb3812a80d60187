"""The prepass: components of an objective see the whole optimizer step before it is cut into micro-batches.

Three kinds of component ask for it: token selectors, losses with a `choose`, and losses of whole responses. They see
columns that one pass without gradient gave, in the order of the batch; what they answer is columns again, so the
gradient does not depend on how the step is cut or dealt out (N1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.components import SequenceLoss
from rlvr.core.needs import CURRENT, PROXIMAL, REFERENCE
from rlvr.losses.objective import ObjectiveTerm
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import TokenBatch
from rlvr.records import Batch

Columns = Mapping[tuple[str, str], Sequence[np.ndarray]]
"""(statistic, model) -> one array [T_b] per rollout of the batch."""


@dataclass(frozen=True)
class PrepassResult:
    """The result of a component; a column has one array [T_b] per rollout of the batch, 0 where it was not asked."""

    kept: list[np.ndarray] | None = None
    """Factor of each token's loss, by the component's token selectors."""
    chosen: list[np.ndarray] | None = None
    """The result of the loss's own `choose`, a column."""
    sequence_losses: np.ndarray | None = None
    """float64 [B]: the contribution of each response to a loss of whole responses."""
    logprob_gradients: np.ndarray | None = None
    """float64 [B]: its derivative in the sum of the response's log-probs."""


def prepass_statistics(
    component: ObjectiveTerm, batch: Batch, index: np.ndarray, columns: Columns, weights: Sequence[np.ndarray]
) -> PrepassResult:
    """The result of `component` for the rollouts at `index`, whose tokens weigh `weights`."""
    index = np.asarray([i for i in index if np.any(weights[i] != 0)], dtype=np.int64)
    if len(index) == 0:
        return PrepassResult()
    if isinstance(component.loss, SequenceLoss):
        return _of_responses(component.loss, batch, index, columns, weights)
    tokens, where = _tokens(component, batch, index, columns, weights)
    kept = chosen = None
    if component.keep:
        factors = [selector(tokens) for selector in component.keep]
        kept = _column(batch, index, where, torch.stack(factors).prod(0))
    answer = component.loss.choose(tokens)
    if answer is not None:
        chosen = _column(batch, index, where, answer)
    return PrepassResult(kept, chosen)


def _of_responses(
    loss: SequenceLoss, batch: Batch, index: np.ndarray, columns: Columns, weights: Sequence[np.ndarray]
) -> PrepassResult:
    def sums(values: Sequence[np.ndarray] | None) -> torch.Tensor:
        # The loss has not declared this model; NaN shows at once in a loss that reads it all the same.
        if values is None:
            return torch.full((len(index),), torch.nan, dtype=torch.float64)
        # Columns are NaN where nothing trains, and 0 x NaN is NaN: only tokens with a weight are summed.
        of_each = [(weights[i].astype(np.float64) * values[i])[weights[i] != 0].sum() for i in index]
        return torch.tensor(of_each, dtype=torch.float64)

    part = batch.select(index)
    # float64 [S], the leaf that the loss is differentiated in.
    logprobs = sums(columns["logprobs", CURRENT]).requires_grad_()
    length = torch.tensor([float(weights[i].sum()) for i in index], dtype=torch.float64)
    if batch.has("advantage"):
        # [S]: the mean over the trained tokens, each by its weight.
        advantage = sums(batch.tokens("advantage")) / length
    else:
        advantage = torch.zeros_like(length)
    sequences = SequenceBatch(
        logprobs,
        sums(columns["logprobs", PROXIMAL]),
        sums(columns.get(("logprobs", REFERENCE))),
        length,
        torch.from_numpy(part.group_index()),
        torch.from_numpy(part.column("reward")),
        advantage,
    )
    with torch.enable_grad():
        sequence_losses = loss.sequence_losses(sequences)
        if sequence_losses.requires_grad:
            # [S] g_i = d sum(L) / d log pi(y_i). The learner adds g_i log pi(y_i) to its loss, whose gradient in the
            # weights is that of L by the chain rule, whatever micro-batch y_i is in.
            (logprob_gradients,) = torch.autograd.grad(sequence_losses.sum(), logprobs)
        else:
            # A loss that returned a constant: there is no graph to differentiate.
            (logprob_gradients,) = (torch.zeros_like(sequence_losses),)
    # float64 [2, B]; rollouts that the component does not train keep 0.
    of_batch = np.zeros((2, len(batch)))
    of_batch[:, index] = torch.stack([sequence_losses.detach(), logprob_gradients]).numpy()
    return PrepassResult(sequence_losses=of_batch[0], logprob_gradients=of_batch[1])


def _tokens(
    component: ObjectiveTerm, batch: Batch, index: np.ndarray, columns: Columns, weights: Sequence[np.ndarray]
) -> tuple[TokenBatch, list[np.ndarray]]:
    """The tokens with a weight, one after the other in float64, and which of each rollout's they are."""
    # bool [T_b] each.
    where = [weights[i] != 0 for i in index]

    def flat(values: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values[i][on] for i, on in zip(index, where, strict=True)])).double()

    lengths = torch.tensor([int(on.sum()) for on in where])
    weight = flat(weights)
    return (
        # float64, so that a quantile or a sort does not depend on the float32 rounding of sums in another order.
        TokenBatch(
            sequence=torch.repeat_interleave(torch.arange(len(index)), lengths),
            sequences=len(index),
            weight=weight,
            advantage=flat(batch.tokens("advantage")) if batch.has("advantage") else torch.zeros_like(weight),
            proximal_logprobs=flat(columns["logprobs", PROXIMAL]),
            behaviour_logprobs=flat([r.behaviour_logprobs for r in batch.rollouts]),
            statistics={key: flat(values) for key, values in columns.items()},
            columns={read: flat(batch.tokens(read)) for read in component.reads},
        ),
        where,
    )


def _column(batch: Batch, index: np.ndarray, where: Sequence[np.ndarray], values: torch.Tensor) -> list[np.ndarray]:
    column = [np.zeros(len(r), dtype=np.float32) for r in batch.rollouts]
    cuts = np.cumsum([int(on.sum()) for on in where])[:-1]
    for i, on, part in zip(index, where, np.split(values.numpy().astype(np.float32), cuts), strict=True):
        # [T_b] with the answer at trained tokens and 0 elsewhere.
        column[i][on] = part
    return column
