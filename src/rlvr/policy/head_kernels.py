"""Triton kernels of the fused LM head: one launch for the sums over a tile of logits, one for the tile's gradient.

The products themselves stay with torch: cuBLAS is faster than a product inside a Triton kernel, and a head of several
terms (a bias, LoRA) needs nothing special. A tile is the products [t, v] as they come from the matrix product, in its
type; scale, soft-cap and temperature are applied while a kernel reads it. So a tile is written once and read once in
the forward pass; in the backward pass its gradient takes its place. Everything is computed in float32 (float64 where
the factors are).

How others do it, of which this takes the split of the work and no code: Liger-Kernel computes products by torch and
softmax and gradient by one kernel over the tile, in place (linkedin/Liger-Kernel ead96b6,
src/liger_kernel/ops/fused_linear_cross_entropy.py); verl keeps the logits of the forward pass in registers and writes
the gradient of 9,504 vocabulary entries at a time, which torch multiplies (volcengine/verl b178a3c,
verl/utils/kernel/kernels.py: `_Split_Dlogits_N`).

Imported only where triton is installed (`rlvr.policy.head_devices`). With TRITON_INTERPRET=1 in the
environment before triton is imported, the kernels run on a CPU, which is how they are tested.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

SUM_BLOCK = 4096
"""Entries that a program of `_sums` reads at once: 16 a thread with 8 warps. Not tuned on a GPU."""
GRADIENT_BLOCK = 2048
"""Entries that a program of `_gradient` writes. Not tuned on a GPU."""
WARPS = 8


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Tanh by one exponential of a number that is not positive, which cannot overflow."""
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    products,
    factor,
    ids,
    maximum,
    mass,
    entropy,
    squares,
    total,
    chosen,
    first,
    columns,
    INNER: tl.constexpr,
    LOWEST: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the `columns` products of one token to its sums so far. products [t, columns]; the others [t].

    `first`: the vocabulary entry of column 0. INNER: the factor inside the soft-cap's tanh; None: no cap. Sums that
    were not asked for are None. The recurrences are those of `fused_head.Running`.
    """
    row = tl.program_id(0)
    f = tl.load(factor + row)
    m = tl.load(maximum + row)
    s = tl.load(mass + row)
    if ids is not None:
        own = tl.load(ids + row) - first
        picked = tl.load(chosen + row)
    if entropy is not None:
        h = tl.load(entropy + row)
    if squares is not None:
        q = tl.load(squares + row)
    if total is not None:
        sum_of_logits = tl.load(total + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(products + row * columns + column, mask=inside, other=0.0).to(f.dtype)
        if INNER is not None:
            z = _tanh(z * INNER)
        z = z * f
        if total is not None:
            sum_of_logits += tl.sum(tl.where(inside, z, 0.0), 0)
        if ids is not None:
            # Each id lies in one tile of its row; elsewhere this adds 0.
            picked += tl.sum(tl.where(inside & (column == own), z, 0.0), 0)
        # After the cap and the factor, which would make something finite of a minus infinity.
        z = tl.where(inside, z, -float("inf"))
        largest = tl.maximum(m, tl.max(z, 0))
        # Relative to a finite number where all logits so far are minus infinity.
        anchor = tl.maximum(largest, LEAST)
        shift = tl.maximum(m, LEAST) - anchor
        faded = tl.exp(shift)
        z = z - anchor
        weight = tl.exp(z)
        if entropy is not None:
            h = faded * (h + shift * s) + tl.sum(weight * tl.maximum(z, LOWEST), 0)
        if squares is not None:
            q = faded * faded * q + tl.sum(weight * weight, 0)
        s = faded * s + tl.sum(weight, 0)
        m = largest
    tl.store(maximum + row, m)
    tl.store(mass + row, s)
    if ids is not None:
        tl.store(chosen + row, picked)
    if entropy is not None:
        tl.store(entropy + row, h)
    if squares is not None:
        tl.store(squares + row, q)
    if total is not None:
        tl.store(total + row, sum_of_logits)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    products,
    gradients,
    factor,
    anchor,
    log_mass,
    ids,
    a,
    b,
    c,
    d,
    hot,
    first,
    columns,
    INNER: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of BLOCK products of one token. products and gradients [t, columns]; the others [t].

    p (a + b log p + c p) + d + (hot at the token itself), as in `fused_head`; what was not asked for is None.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    f = tl.load(factor + row)
    z = tl.load(products + row * columns + column, mask=inside, other=0.0).to(f.dtype)
    if INNER is not None:
        bent = _tanh(z * INNER)
        z = bent * f
    else:
        z = z * f
    z = z - tl.load(anchor + row) - tl.load(log_mass + row)
    p = tl.exp(z)
    inner = tl.load(a + row)
    if b is not None:
        inner += tl.load(b + row) * tl.maximum(z, LOWEST)
    if c is not None:
        inner += tl.load(c + row) * p
    g = p * inner
    if d is not None:
        g += tl.load(d + row)
    if hot is not None:
        own = tl.load(ids + row) - first
        g += tl.where(column == own, tl.load(hot + row), 0.0)
    if INNER is not None:
        # d tanh / dx = 1 - tanh^2
        g = g * (1 - bent * bent)
    tl.store(gradients + row * columns + column, g.to(gradients.dtype.element_ty), mask=inside)


def add_tile(
    products: torch.Tensor,
    factor: torch.Tensor,
    ids: torch.Tensor | None,
    sums: tuple[torch.Tensor | None, ...],
    first: int,
    inner: float | None,
    lowest: float,
) -> None:
    """Add a tile of products [t, v], contiguous, to the sums of its tokens, in place.

    factor, ids and each of `sums` (maximum, mass, entropy, squares, total and chosen) are [t]; None: not asked for.
    `first` is the vocabulary entry of column 0, `inner` the factor inside the soft-cap's tanh.
    """
    tokens, columns = products.shape
    least = torch.finfo(factor.dtype).min
    block = min(SUM_BLOCK, triton.next_power_of_2(columns))
    _launch(_sums, (tokens,), products, factor, ids, *sums, first, columns, inner, lowest, least, BLOCK=block)


def gradient_tile(
    products: torch.Tensor,
    gradients: torch.Tensor,
    factor: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor | None,
    coefficients: tuple[torch.Tensor | None, ...],
    first: int,
    inner: float | None,
    lowest: float,
) -> None:
    """Write the gradients of a tile of products into `gradients` [t, v], which may be `products` itself.

    `state`: the anchor and the logarithm of the mass; `coefficients`: a, b, c, d and hot; each is [t].
    """
    tokens, columns = products.shape
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
    grid = (tokens, triton.cdiv(columns, block))
    _launch(
        _gradient, grid, products, gradients, factor, *state, ids, *coefficients, first, columns, inner, lowest,
        BLOCK=block,
    )  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, ...], tile: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of the tile, which need not be the current one. Every launch passes here."""
    if not tile.numel():
        return
    with torch.cuda.device_of(tile):
        kernel[grid](tile, *arguments, num_warps=WARPS, **constants)
