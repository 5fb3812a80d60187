"""Statistics of the next-token distribution straight from hidden states and the LM head, and their gradients.

The logits [T, V] never exist: they are computed a tile [t, v] at a time, forward and again in the backward pass, where the
tile becomes the gradient of the logits and is at once multiplied into the gradients of the inputs and the weights. The
vocabulary is the outer loop, so that a slice of the weights is read, and its gradient summed, once. Where the logits are
few they are one tile and are kept. Invariants: sums are in float32 (or
float64 when the inputs are), whatever the matrix products are in; a logit of minus infinity is a token of probability
zero; one that is NaN makes that token's statistics NaN and nothing fails; same inputs, same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlvr.policy.head import Head, gather_until_backward_ends, gathered
from rlvr.policy.head_sums import Running, Slope, finish
from rlvr.policy.head_tiles import NAMES, PAIRS, TOP, Logits, Plan, fits, tiles


def fused_statistics(
    head: Head,
    temperature: torch.Tensor,
    asked: Mapping[str, bool],
    ids: torch.Tensor | None = None,
    top_k: int = 0,
    *,
    id_range: tuple[int, int] | None = None,
    common_temperature: float | None = None,
) -> dict[str, torch.Tensor]:
    """The statistics in `asked` (name -> whether it is differentiated) of logits divided by `temperature` [T].

    pair_logprobs [T, K]: log-probs of `ids`, int64 [T, K]. entropy, logsumexp, mean_logit, max_logit, sum_squared_probs: [T].
    top_k: log-probs [T, top_k] of the most likely tokens, best first, and with them top_k_ids; equal ones in no set order.
    max_logit is differentiated at one token, also where several are equal. Second derivatives are refused.
    What the caller knows on the host is not read from the device, which would have to be waited for: `id_range`, the smallest
    and the largest of `ids` (None: they are read), and `common_temperature`, that of all tokens (None: not known).
    """
    tensors = (*head.inputs, *head.weights)
    with gathered(head.weights), torch.set_grad_enabled(torch.is_grad_enabled() and any(asked.values())):
        if PAIRS in asked and ids is not None and ids.numel():
            _check_ids(head, id_range or _range(ids))
        if TOP in asked:
            _check_top_k(head, top_k)
        plan = Plan(dict(asked), top_k, len(head.inputs), head.scale, head.cap, head.vocabulary, common_temperature)
        values = _Fused.apply(plan, ids, temperature, *tensors)
    result = {name: value for name, value in zip(NAMES, values, strict=False) if value is not None}
    if TOP in asked:
        result["top_k_ids"] = values[-1]
    return result


def _range(ids: torch.Tensor) -> tuple[int, int]:
    low, high = ids.aminmax()
    return int(low), int(high)


def _check_ids(head: Head, id_range: tuple[int, int]) -> None:
    low, high = id_range
    if low < 0 or high >= head.vocabulary:
        worst = low if low < 0 else high
        raise ValueError(f"token id {worst} is outside the LM head, which has {head.vocabulary} rows")


def _check_top_k(head: Head, top_k: int) -> None:
    if top_k > head.vocabulary:
        raise ValueError(f"top-k of {top_k} tokens was asked for and the LM head has {head.vocabulary} rows")


class _Fused(torch.autograd.Function):
    """Statistics of a head; its gradients are accumulated tile by tile."""

    @staticmethod
    def forward(ctx, plan, ids, temperature, *tensors):  # type: ignore[no-untyped-def]
        logits = Logits(plan, temperature, tensors[: plan.terms], tensors[plan.terms :])
        tokens, keep = len(tensors[0]), None
        running = Running(plan, ids, tokens, logits.buffer)
        scratch = logits.buffer
        for part, rows_of_part in tiles(tokens, plan, tensors[0].device):
            weights = logits.columns(part)
            for rows in rows_of_part:
                z = logits.tile(rows, part, weights)
                scratch = scratch if scratch.numel() >= z.numel() else torch.empty_like(z).view(-1)
                running.add(rows, part, z, scratch[: z.numel()].view(z.shape))
                keep = z
        values, state = finish(plan, running)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        kept = keep if fits(tokens, plan) and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(*tensors, temperature, ids, running.top_ids, kept, *state)
        ctx.mark_non_differentiable(
            *(v for v, grad in zip(values, [*plan.outputs, False], strict=True) if v is not None and not grad)
        )
        return tuple(values)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            raise NotImplementedError("the fused LM head has no second derivatives: backward without create_graph")
        plan, tensors, needed = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[3:]
        count = len(needed)
        temperature, ids, top_ids, kept, *state = tensors[count:]
        weights = tensors[plan.terms : count]
        gather_until_backward_ends(weights)
        logits = Logits(plan, temperature, tensors[: plan.terms], weights)
        slope = Slope(plan, gradients, (ids, top_ids), state, logits.factor)
        return (None, None, None, *_gradients(logits, slope, kept, needed))


def _gradients(
    logits: Logits, slope: Slope, kept: torch.Tensor | None, needed: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Gradients of the inputs and of the weights, None where they are not needed."""
    inputs, weights, plan = logits.inputs, logits.weights, logits.plan
    wide = [
        torch.zeros_like(x, dtype=logits.dtype) if need else None
        for x, need in zip(inputs, needed[: plan.terms], strict=True)
    ]
    whole = [torch.zeros_like(w) if need else None for w, need in zip(weights, needed[plan.terms :], strict=True)]
    scratch = logits.buffer
    for part, rows_of_part in tiles(len(inputs[0]), plan, inputs[0].device):
        columns = logits.columns(part)
        sums = [None if w is None else _sums(w[part], logits.dtype) for w in whole]
        for rows in rows_of_part:
            z = kept if kept is not None else logits.tile(rows, part, columns)
            scratch = scratch if scratch.numel() >= z.numel() else torch.empty_like(z).view(-1)
            dz = slope.of(rows, part, z, scratch[: z.numel()].view(z.shape), kept is not None)
            if not weights and wide[0] is not None:
                wide[0][rows, part] = dz
            low = dz.to(inputs[0].dtype)
            for into, column in zip(wide, columns, strict=False):
                if into is not None:
                    _add_product(into[rows], low, column)
            for into, x in zip(sums, inputs, strict=False):
                if into is not None:
                    _add_product(into, low.t(), x[rows])
        for w, total in zip(whole, sums, strict=True):
            if w is not None and total is not None and total.dtype != w.dtype:
                w[part] = total
    narrow = [None if g is None else g.to(x.dtype) for g, x in zip(wide, inputs, strict=True)]
    return [*narrow, *whole]


def _sums(into: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where a tile's gradients of the weights are summed: in place, or beside it where it is less precise."""
    return into if into.dtype == dtype else torch.zeros_like(into, dtype=dtype)


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)
