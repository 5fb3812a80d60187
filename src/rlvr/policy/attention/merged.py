"""Attention of a packed row: its calls, merged by their log-sum-exp.

Softmax over the union of two sets of keys is the mean of the softmaxes over each, weighted by their sums of
exponentials. So with out_i and lse_i = log sum exp(scores) of each call,

    lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i.

In the backward pass each call needs only the merged `out` and `lse`: the probability of a pair is exp(score - lse)
whichever call it is in, and the gradient of its score is that probability times (gradient . value - gradient . out).
(Ring attention merges blocks of keys in the same way: Liu et al. 2023, arXiv:2310.01889.) A sink, one more score per
head that has no value (gpt-oss), is a call without keys, whose lse is the sink.
"""

from __future__ import annotations

from typing import Any

import torch

from rlvr.policy.attention.calls import ScoreRule, Segments
from rlvr.policy.attention.kernels import kernel_for

TOGETHER = 1 << 14
"""Tokens whose outputs are merged at a time. Merging is in float32 and has three tensors of these tokens' outputs: for
28 heads of 128 numbers 0.7 GiB, of however many tokens."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: list[Segments],
    scoring: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, H, D], [N, G, D], [N, G, E] -> [N, H, E]: each token's attention to what it sees by `segments`.

    H is a multiple of G, and each G serves H / G heads in a row. The first call has all tokens of the row as queries.
    `sinks`: a score for each head, [H]. Under autocast it is computed in autocast's dtype.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Rotary embeddings leave queries and keys in float32 there.
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    with torch.autocast(kind, enabled=False):
        return _Attention.apply(query, key, value, sinks, segments, scoring)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        segments: list[Segments],
        scoring: ScoreRule,
    ) -> torch.Tensor:
        output: torch.Tensor | None = None
        lse: torch.Tensor | None = None
        # Merging is in float32, and rounds once: a single merge its result, several the last one's.
        several = len(segments) - 1 + (sinks is not None) > 1
        for part in segments:
            own, sums = kernel_for(query, value, part, scoring).forward(*_taken(query, key, value, part), part, scoring)
            if output is None or lse is None:
                output, lse = own.to(sums.dtype) if several else own, sums
            else:
                _merge(output, lse, own, sums, part)
        assert output is not None and lse is not None, "a row has at least one run"
        if sinks is not None:
            lse = _with_sinks(output, lse, sinks)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        ctx.segments = segments
        ctx.scoring = scoring
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        query, key, value, output, lse, sinks = ctx.saved_tensors
        first, *others = ctx.segments
        # Sums of several calls are added up in the precision of the log-sum-exp.
        kind = lse.dtype if others or first.keys is not None else query.dtype
        of_query, of_key, of_value = (torch.zeros(x.shape, dtype=kind, device=x.device) for x in (query, key, value))
        for part in ctx.segments:
            places = part.varlen.queries
            dq, dk, dv = kernel_for(query, value, part, ctx.scoring).backward(
                _at(gradient, places),
                *_taken(query, key, value, part),
                _at(output, places),
                _at(lse, places, 1),
                part,
                ctx.scoring,
            )
            if places is None:
                of_query += dq
            else:
                of_query.index_add_(0, places, dq.to(kind))
            _add_at_keys(of_key, dk, part)
            _add_at_keys(of_value, dv, part)
        of_sinks = None
        if sinks is not None:
            # d lse / d sink is the sink's probability, and its value is 0: -(sum over tokens of p x gradient . out).
            mean = (gradient.to(lse.dtype) * output.to(lse.dtype)).sum(-1).T
            of_sinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * mean).sum(1).to(sinks.dtype)
        dtype = query.dtype
        return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype), of_sinks, None, None


def _taken(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Segments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The queries, keys and values of a call."""
    where = part.varlen
    return _at(query, where.queries), _at(key, where.keys), _at(value, where.keys)


def _at(x: torch.Tensor, places: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    """The given places of `x` along `dim`; None: all of it."""
    if places is None:
        return x
    return x.index_select(dim, places)


def _merge(output: torch.Tensor, lse: torch.Tensor, own: torch.Tensor, sums: torch.Tensor, part: Segments) -> None:
    """Put one more call's outputs [Q, H, E] and sums [H, Q] into those so far, [N, H, E] and [H, N], at its queries."""
    places = part.varlen.queries
    if places is None:
        places = torch.arange(len(output), device=output.device)
    for some, added, added_sums in zip(
        places.split(TOGETHER), own.split(TOGETHER), sums.split(TOGETHER, 1), strict=True
    ):
        before = lse.index_select(1, some)
        total = torch.logaddexp(before, added_sums)
        mixed = output.index_select(0, some) * _per_head(torch.exp(before - total))
        mixed += added * _per_head(torch.exp(added_sums - total))
        output.index_copy_(0, some, mixed.to(output.dtype))
        lse.index_copy_(1, some, total)


def _with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Give each sum one more exponential, that of its head's sink, and scale the outputs to it; the new sums."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    weights = _per_head(torch.exp(lse - total))
    for some, own in zip(output.split(TOGETHER), weights.split(TOGETHER), strict=True):
        some.copy_(some * own)
    return total


def _per_head(weights: torch.Tensor) -> torch.Tensor:
    """[H, N] -> [N, H, 1]"""
    return weights.T[..., None]


def _add_at_keys(total: torch.Tensor, part_gradient: torch.Tensor, part: Segments) -> None:
    """Add the gradient of a call's keys to the row's, in as many operations however often a key occurs."""
    where = part.varlen
    if where.keys is None:
        total += part_gradient
        return
    part_gradient = part_gradient.to(total.dtype)
    if where.repeats is None:
        total.index_add_(0, where.keys, part_gradient)
        return
    # `index_add_` of repeated places adds in any order on a GPU, and so gives other bits each time.
    ordered = part_gradient.index_select(0, where.repeats.order)
    # unsafe: that the counts add up to all keys is known, and checking it would wait for the device.
    sums = torch.segment_reduce(ordered, "sum", lengths=where.repeats.counts, unsafe=True)
    total.index_add_(0, where.repeats.places, sums)
