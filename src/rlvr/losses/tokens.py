"""The input of a loss: the trained tokens of a micro-batch, flat, with the statistics that it declared.

There is no padding and no logits here: T trained tokens of S sequences stand one after the other. A rollout is always
whole within a micro-batch, so sums over a sequence are local; sums over the optimizer step come in as `Denominators`,
counted once over all micro-batches and ranks, so that the loss does not depend on how the batch is cut (N1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BeforeValidator

from rlvr.core.needs import CURRENT, REFERENCE

Ratio = Literal["token", "sequence", "geometric", "geometric_token"]
AVERAGE_ALIASES = {"token-mean": "tokens", "seq-mean-token-mean": "sequences", "seq-mean-token-sum-norm": "constant"}
"""Names of `loss_agg_mode` in verl (verl/trainer/ppo/core_algos.py, agg_loss) -> the average here."""


def _average_named(value: Any) -> Any:
    return AVERAGE_ALIASES.get(value, value) if isinstance(value, str) else value


_Named = Literal["tokens", "sequences", "groups", "constant"]
AVERAGES = get_args(_Named)
Average = Annotated[_Named, BeforeValidator(_average_named)]
LARGEST_LOG_RATIO = 30.0
"""Nats that the log-ratio to the behaviour policy is cut to: its exponential is still finite in float32."""


@dataclass(frozen=True)
class Denominators:
    """Counts that a component averages over in one optimizer step, all ranks together."""

    tokens: float
    """Sum of the component's token weights."""
    sequences: float
    """Rollouts with any weight."""
    constant: float
    """The length in tokens that the constant average divides each sequence by."""
    groups: float = 0.0
    """Groups with any weight."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The trained tokens of one micro-batch.

    Every tensor is [T] unless said otherwise. `sequence` numbers the rollout of each token, 0 .. S-1. The learner makes
    it in `LossInputs.token_batch`.
    """

    sequence: torch.Tensor
    sequences: int
    weight: torch.Tensor
    """The component's per-token weight, which denominators count; 0 where it does not train the token."""
    advantage: torch.Tensor
    proximal_logprobs: torch.Tensor
    """Log-probs that the ratio is taken to: the detached current ones on a batch's first optimizer step."""
    behaviour_logprobs: torch.Tensor
    """Log-probs of the distribution that sampled; NaN where unknown."""
    statistics: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """(statistic, model) -> [T]"""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Column of the batch that the loss declares in `reads` -> float [T]; `origin` has the numbers of
    `rlvr.records.Origin`."""
    importance: torch.Tensor | None = None
    """Factor of each token's loss from the correction, which counts in no denominator; None: 1."""
    kept: torch.Tensor | None = None
    """Factor of each token's loss from the token selectors, which counts in no denominator; None: 1."""
    factor: torch.Tensor | None = None
    """Factor of the component's coefficient at each token, which counts in no denominator; None: 1."""
    group_weight: torch.Tensor | None = None
    """[S]: the sum of the component's weights over the whole group of each sequence; read by the average over
    groups."""
    chosen: torch.Tensor | None = None
    """The result of the loss's own `choose` for each token, computed from the whole optimizer step."""

    @property
    def loss_weight(self) -> torch.Tensor:
        """The weight x importance x kept x factor: what `average` multiplies each token's loss by."""
        product = self.weight
        for more in (self.importance, self.kept, self.factor):
            # A correction, a selector and a factor change the loss and not the denominators, which are counted from
            # `weight`.
            product = product if more is None else more * product
        return product

    @property
    def behaviour_log_ratio(self) -> torch.Tensor:
        """log pi_proximal - log pi_behaviour, detached; within LARGEST_LOG_RATIO nats."""
        log_ratio = (self.proximal_logprobs - self.behaviour_logprobs).detach()
        return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)

    @property
    def logprobs(self) -> torch.Tensor:
        """Log-probs of the tokens under the current weights, with gradient."""
        return self.statistics["logprobs", CURRENT]

    @property
    def reference_logprobs(self) -> torch.Tensor:
        return self.statistics["logprobs", REFERENCE]

    @property
    def entropy(self) -> torch.Tensor:
        return self.statistics["entropy", CURRENT]

    def sum_by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[T] -> [S]: sums over each sequence."""
        return torch.zeros(self.sequences, dtype=values.dtype, device=values.device).index_add(0, self.sequence, values)

    def mean_by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[T] -> [S]: means over each sequence's tokens; 0 for a sequence without any."""
        # 1.0 stands for the count of a sequence without tokens, whose sum is 0.
        return self.sum_by_sequence(values) / self.sum_by_sequence(torch.ones_like(values)).clamp_min(1.0)

    def average(self, values: torch.Tensor, by: Average, over: Denominators) -> torch.Tensor:
        """This micro-batch's share of the average of `values`, times `loss_weight`, over the whole optimizer step.

        tokens: sum of values over the number of tokens. sequences: the mean over sequences of each one's mean. groups:
        the mean over groups of each one's mean over its tokens. constant: sum of values over sequences x a constant
        length.
        """
        # [T]
        weighted = self.loss_weight * values
        if by == "tokens":
            # DAPO's token mean: sum_t w_t l_t / sum_t w_t, the sums over the whole step.
            return weighted.sum() / over.tokens
        if by == "sequences":
            # GRPO: 1 / S sum_i (1 / |y_i|) sum_t l_t. [S]; a sequence without tokens here is never indexed. The clamp
            # is `tiny` and not 1, because weights below 1 may sum to less than 1 over a short response.
            lengths = self.sum_by_sequence(self.weight).clamp_min(torch.finfo(self.weight.dtype).tiny)
            return (weighted / lengths[self.sequence]).sum() / over.sequences
        if by == "groups":
            assert self.group_weight is not None, "the average over groups needs the weight of each sequence's group"
            return (weighted / self.group_weight[self.sequence]).sum() / over.groups
        if by == "constant":
            # Dr. GRPO: the length that divides is the same for every response, so long ones are not held back.
            return weighted.sum() / (over.sequences * over.constant)
        raise ValueError(f"there is no average {by!r}: {', '.join(AVERAGES)} are the averages of a loss")


@dataclass(frozen=True)
class LossTerm:
    """The result of a loss for a micro-batch.

    `value` is its share of the step's loss (scalar, with gradient). `metrics` are per-token tensors [T] that the
    learner averages by the component's weights over the step (names ending in `max` are maximised instead).
    """

    value: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


def log_ratio(tokens: TokenBatch, level: Ratio = "token", bound: float | None = None) -> torch.Tensor:
    """log pi - log pi_proximal [T], the log of the probability ratio, with gradient.

    token: of the token itself. sequence: summed over its response, the ratio of the whole response. geometric: the mean
    over its response (GSPO, Zheng et al. 2025, eq. 7). geometric_token: the value of geometric with each token's own
    gradient (GSPO-token), which advantages that differ within a response need.

    `bound` clamps each token's log-ratio to [-bound, bound] first; beyond it there is no gradient.
    """
    # [T] log rho_t
    own = tokens.logprobs - tokens.proximal_logprobs
    if bound is not None:
        own = own.clamp(-bound, bound)
    if level == "token":
        return own
    if level == "sequence":
        # log pi(y) - log pi_proximal(y), [T] with one number per response.
        return tokens.sum_by_sequence(own)[tokens.sequence]
    # log s(y) = 1 / |y| sum_t log rho_t, [T] with one number per response.
    mean = tokens.mean_by_sequence(own)[tokens.sequence]
    if level == "geometric":
        return mean
    # The bracket is 0 in value: sg[s(y)] pi_t / sg[pi_t] of GSPO-token, in logs.
    return mean.detach() + (own - own.detach())


def next_of_sequence(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The value at the next token of the same sequence [T], 0 after its last."""
    # Stable: tokens of a sequence keep their order.
    order = torch.sort(sequence, stable=True).indices
    ordered = values[order]
    # bool [T - 1]: whether a token's neighbour on the right is of the same sequence.
    same = sequence[order][1:] == sequence[order][:-1]
    following = torch.cat([torch.where(same, ordered[1:], 0.0), ordered.new_zeros(min(1, len(ordered)))])
    return torch.empty_like(values).index_copy(0, order, following)
