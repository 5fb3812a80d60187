"""The statistics that losses declare, from one forward pass, without a [tokens, vocabulary] matrix for the whole batch.

Only trained positions are projected, in chunks of at most `CHUNK` logits; in the backward pass a chunk's logits are
computed again instead of being kept. Log-softmax is in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.checkpoint import checkpoint

from rlvr.needs import CURRENT, Need
from rlvr.policy.microbatch import MicroBatch
from rlvr.policy.model import Policy

CHUNK = 1 << 24
"""Logits at once: 64 MiB in float32."""


def forward(policy: Policy, rows: MicroBatch, needs: Iterable[Need]) -> dict[tuple[str, str], torch.Tensor]:
    """The statistics of the current model that `needs` names, at the trained tokens: (statistic, "current") -> [T].

    Log-probs and entropy are those of the sampling distribution: logits divided by each token's temperature.
    """
    asked: dict[str, bool] = {}
    for need in needs:
        if need.model == CURRENT:
            asked[need.statistic] = asked.get(need.statistic, False) or need.grad
    hidden = _hidden_at_trained(policy, rows)
    size = max(1, CHUNK // max(1, policy.causal_lm.config.get_text_config().vocab_size))
    chunks = []
    for start in range(0, len(rows.targets), size):
        part = slice(start, start + size)
        arguments = (policy, hidden[part], rows.targets[part], rows.temperature[part], asked)
        if torch.is_grad_enabled() and len(rows.targets) > size:
            chunks.append(checkpoint(_statistics, *arguments, use_reentrant=False))
        else:
            chunks.append(_statistics(*arguments))
    return {(name, CURRENT): torch.cat([chunk[name] for chunk in chunks]) for name in asked}


def _hidden_at_trained(policy: Policy, rows: MicroBatch) -> torch.Tensor:
    """[T, H] hidden states that predict the trained tokens (or their logits, for a model with an unusual head)."""
    at = (rows.row, rows.column - 1)
    if policy.head_is_enough:
        return policy.hidden_states(rows.input_ids, rows.attention_mask, rows.position_ids)[at]
    return policy.own_logits(rows.input_ids, rows.attention_mask, rows.position_ids)[at]


def _statistics(
    policy: Policy, hidden: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, asked: dict[str, bool]
) -> dict[str, torch.Tensor]:
    logits = (policy.logits(hidden) if policy.head_is_enough else hidden) / temperature[:, None]
    logits = logits - logits.detach().amax(-1, keepdim=True)  # so that nothing large cancels
    log_partition = torch.logsumexp(logits, dim=-1)
    result = {}
    if "logprobs" in asked:
        result["logprobs"] = logits.gather(-1, targets[:, None]).squeeze(-1) - log_partition
    if "entropy" in asked:
        with torch.set_grad_enabled(torch.is_grad_enabled() and asked["entropy"]):
            inside = logits if asked["entropy"] else logits.detach()
            normaliser = log_partition if asked["entropy"] else log_partition.detach()
            probabilities = torch.exp(inside - normaliser[:, None])
            result["entropy"] = normaliser - (probabilities * inside.nan_to_num(neginf=0.0)).sum(-1)
    return result
