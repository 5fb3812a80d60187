"""Statistics of the next-token distribution straight from hidden states and the LM head, and their gradients.

The logits [T, V] never exist: they are computed a tile [t, v] at a time, forward and again in the backward pass, where
the tile becomes the gradient of the logits and is at once multiplied into the gradients of the inputs and the weights.
The vocabulary is the outer loop, so that a slice of the weights is read, and its gradient summed, once. Where the
logits are few they are one tile and are kept. With p the softmax of a token's logits z, the gradient of every statistic
in z has the form

    p (a + b log p + c p) + d + (g at the token itself)

with one number a, b, c, d per token, so that all that were asked for cost one pass. On a GPU with triton installed the
passes over a tile are kernels (`rlvr.policy.head_kernels`), elsewhere operations of torch. Invariants: sums are in
float32 (or float64 when the inputs are), whatever the matrix products are in; a logit of minus infinity is a token of
probability zero; one that is NaN makes that token's statistics NaN and nothing fails; same inputs, same bits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch

from rlvr.policy.head_devices import sums_wide, triton_kernels
from rlvr.policy.head_tiles import HeadBuffers, TilePlan, fits, shaped, tile_size, tiles
from rlvr.policy.model import Head, gather_until_backward_ends, gathered

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton's interpreter runs its kernels on a CPU, as tests have it."""
# Any finite number would do, since the probability that multiplies it is 0; minus infinity would give NaN.
LOWEST = -1e30
"""Stands for a log-probability of minus infinity where it is multiplied by a probability of zero."""
LOGPROBS = "logprobs"
ENTROPY = "entropy"
LSE = "logsumexp"
MEAN = "mean_logit"
SQUARES = "sum_squared_probs"
NAMES = (LOGPROBS, ENTROPY, LSE, MEAN, SQUARES)
"""In the order in which the autograd function returns them."""


def fused_statistics(
    head: Head,
    temperature: torch.Tensor,
    asked: Mapping[str, bool],
    ids: torch.Tensor | None = None,
    *,
    id_range: tuple[int, int] | None = None,
    common_temperature: float | None = None,
) -> dict[str, torch.Tensor]:
    """The statistics in `asked` (name -> whether it is differentiated) of logits divided by `temperature` [T].

    Each is [T]. logprobs are those of `ids`, int64 [T]. Second derivatives are refused. What the caller knows on the
    host is not read from the device, which would have to be waited for: `id_range`, the smallest and the largest of
    `ids` (None: they are read), and `common_temperature`, that of all tokens (None: not known).
    """
    # [T, H_i] and [V, H_i] of each term.
    tensors = (*head.inputs, *head.weights)
    with gathered(head.weights), torch.set_grad_enabled(torch.is_grad_enabled() and any(asked.values())):
        if LOGPROBS in asked and ids is not None and ids.numel():
            low, high = id_range or map(int, ids.aminmax())
            if low < 0 or high >= head.vocabulary:
                worst = low if low < 0 else high
                raise ValueError(f"token id {worst} is outside the LM head, which has {head.vocabulary} rows")
        if ids is not None:
            # The kernels read the ids of neighbouring tokens from neighbouring places.
            ids = ids.contiguous()
        # Made here, while a partitioned head is gathered and its number of rows is known.
        device = head.inputs[0].device
        plan = TilePlan(
            dict(asked),
            len(head.inputs),
            head.scale,
            head.cap,
            head.vocabulary,
            tile_size(device),
            (INTERPRETED or device.type == "cuda") and triton_kernels() is not None,
            head.inputs[0].dtype.itemsize < 4 and sums_wide(device),
            common_temperature,
        )
        values = _Fused.apply(plan, ids, temperature, *tensors)
    return {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}


def _kernels() -> ModuleType:
    kernels = triton_kernels()
    assert kernels is not None, "a plan has kernels only where there are any"
    return kernels


class Logits:
    """Tiles of logits, tempered and capped, in one buffer that is used again and again."""

    def __init__(
        self,
        plan: TilePlan,
        temperature: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
        weights: tuple[torch.Tensor, ...],
        trained: Sequence[bool] | None = None,
    ) -> None:
        """`trained`: which weights get a gradient, in a backward pass; None: in a forward pass."""
        self.plan = plan
        self.inputs = inputs
        self.weights = weights
        self.dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        # logits / temperature = (last_factor / temperature) x what is in the tile.
        self.factor = plan.last_factor / temperature.to(self.dtype)[:, None]
        """[T, 1]: what a tile is multiplied by last."""
        self.unchanged = plan.common_temperature == plan.last_factor
        """True if `factor` is known to be 1. Where that is not known, the product is computed; a product with 1 has the
        same bits."""
        self.buffers = HeadBuffers(plan, inputs, weights, trained)

    def columns(self, part: slice) -> list[torch.Tensor]:
        """The rows of the weights for some vocabulary entries, in the dtype of the inputs."""
        rows = [weight[part] for weight in self.weights]
        return [
            row if into is None else into[: len(row)].copy_(row)
            for into, row in zip(self.buffers.columns, rows, strict=True)
        ]

    def scratch(self, z: torch.Tensor) -> torch.Tensor:
        """A buffer of the shape of a tile [t, v], which is overwritten."""
        assert self.buffers.probabilities is not None
        return shaped(self.buffers.probabilities, *z.shape)

    def narrowed(self, gradient: torch.Tensor) -> torch.Tensor:
        """A tile's gradient [t, v] in the type of the inputs, in which the products of the backward pass run."""
        if self.buffers.narrow is None:
            return gradient
        return shaped(self.buffers.narrow, *gradient.shape).copy_(gradient)

    def products(self, rows: slice, part: slice, weights: list[torch.Tensor]) -> torch.Tensor:
        """[t, v] sums of the terms' products, without scale, cap and temperature, in the buffer."""
        shape = (rows.stop - rows.start, part.stop - part.start)
        z = shaped(self.buffers.logits, *shape)
        if not weights:
            z.copy_(self.inputs[0][rows, part])
        for i, (x, weight) in enumerate(zip(self.inputs, weights, strict=False)):
            # In bfloat16 the product is made in its own type, as the module would make it, and summed in float32.
            if self.buffers.narrow is not None:
                product = torch.mm(x[rows], weight.t(), out=shaped(self.buffers.narrow, *shape))
                z.copy_(product) if i == 0 else z.add_(product)
            elif i == 0:
                torch.mm(x[rows], weight.t(), out=z)
            else:
                z.addmm_(x[rows], weight.t())
        return z

    @staticmethod
    def sums_in(buffer: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
        """The tensor in which a tile's gradients of the weights are summed: the gradient itself, or the buffer where
        that is less precise."""
        return gradient if buffer is None else buffer[: len(gradient)].zero_()

    def add_product(self, into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left @ right to a sum of the backward pass."""
        if left.dtype == into.dtype:
            into.addmm_(left, right)
        elif self.buffers.product is not None:
            into.add_(torch.mm(left, right, out=shaped(self.buffers.product, *into.shape)))
        else:
            # cuBLAS adds to float32 what it sums in float32 itself: one kernel, and no rounding to bfloat16 between.
            torch.addmm(into, left, right, out_dtype=into.dtype, out=into)

    def tile(self, rows: slice, part: slice, weights: list[torch.Tensor]) -> torch.Tensor:
        """[t, v] logits, in the buffer."""
        z = self.products(rows, part, weights)
        if self.plan.cap is not None:
            # cap tanh(scale x / cap); the cap itself is in the last factor.
            z.mul_(self.plan.scale / self.plan.cap).tanh_()
        if self.unchanged:
            return z
        return z.mul_(self.factor[rows])


class Running:
    """Sums over the vocabulary so far, for every token, relative to its largest logit so far."""

    def __init__(self, plan: TilePlan, ids: torch.Tensor | None, tokens: int, like: torch.Tensor) -> None:
        def zeros() -> torch.Tensor:
            return like.new_zeros(tokens)

        asked = plan.asked
        self.plan = plan
        self.ids = ids if LOGPROBS in asked else None
        # m = largest logit so far, mass = sum exp(z - m), entropy = sum exp(z - m) (z - m), squares = sum exp(z - m)^2,
        # each [T].
        self.maximum = torch.full_like(zeros(), -torch.inf)
        self.mass = zeros()
        self.entropy = zeros() if ENTROPY in asked else None
        self.squares = zeros() if SQUARES in asked else None
        self.total = zeros() if MEAN in asked else None
        self.chosen = zeros() if self.ids is not None else None

    def add(self, rows: slice, part: slice, z: torch.Tensor, scratch: torch.Tensor) -> None:
        """Count a tile, which is left relative to the largest logits; `scratch` is overwritten."""
        self._follow(rows, part, z)
        first = part.start == 0
        largest = z.amax(1)
        shift = None
        if not first:
            before = self.maximum[rows]
            largest = torch.maximum(before, largest)
            # Online softmax (Milakov and Gimelshein 2018): sums relative to the old maximum m are multiplied by exp(m -
            # m').
            shift = _anchor(before) - _anchor(largest)
        self.maximum[rows] = largest
        z.sub_(_anchor(largest)[:, None])
        weight = torch.exp(z, out=scratch)
        mass = weight.sum(1)
        faded = None if shift is None else shift.exp()
        old = self.mass[rows]
        if self.squares is not None:
            # One pass that allocates nothing of the tile's size, which weight.square() would.
            squares = torch.linalg.vector_norm(weight, dim=1).square()
            self.squares[rows] = squares if faded is None else squares + faded.square() * self.squares[rows]
        if self.entropy is not None:  # last, as it overwrites the weights
            entropy = weight.mul_(z.clamp_(min=LOWEST)).sum(1)
            if shift is not None and faded is not None:
                # sum e^(z - m') (z - m') = e^(m - m') (sum e^(z - m) (z - m) + (m - m') sum e^(z - m)).
                entropy += faded * (self.entropy[rows] + shift * old)
            self.entropy[rows] = entropy
        self.mass[rows] = mass if faded is None else mass + faded * old

    def add_products(self, rows: slice, part: slice, products: torch.Tensor, factor: torch.Tensor) -> None:
        """Count a tile of products [t, v], as `add` does its logits, by one kernel."""
        sums = (self.maximum, self.mass, self.entropy, self.squares, self.total, self.chosen)
        _kernels().add_tile(
            products,
            factor[rows],
            None if self.ids is None else self.ids[rows],
            tuple(None if values is None else values[rows] for values in sums),
            part.start,
            self.plan.inner_factor,
            LOWEST,
        )

    def _follow(self, rows: slice, part: slice, z: torch.Tensor) -> None:
        if self.total is not None:
            self.total[rows] += z.sum(1)
        if self.ids is not None and self.chosen is not None:
            # Each id lies in one tile of its row; in the others the value so far is kept.
            inside, local = within(self.ids[rows], part)
            self.chosen[rows] = torch.where(inside, z.gather(1, local[:, None])[:, 0], self.chosen[rows])


def _anchor(largest: torch.Tensor) -> torch.Tensor:
    """Return the logit that the others are taken relative to: the largest, or a finite number where all are minus
    infinity."""
    return largest.clamp(min=torch.finfo(largest.dtype).min)


def within(ids: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the token ids that are in `part` of the vocabulary, and their places in it (0 for the
    others)."""
    inside = (ids >= part.start) & (ids < part.stop)
    return inside, torch.where(inside, ids - part.start, 0)


def finish(plan: TilePlan, running: Running) -> tuple[list[torch.Tensor | None], tuple[torch.Tensor, ...]]:
    """The statistics in the order of NAMES, and what the backward pass needs of the sums."""
    asked = plan.asked
    anchor = _anchor(running.maximum)
    # [T]: logsumexp = anchor + log_mass.
    log_mass = running.mass.log()
    # H = log sum e^(z - m) - E[z - m]. By the maximum and not as logsumexp - mean logit, which cancels at large logits.
    entropy = None if running.entropy is None else log_mass - running.entropy / running.mass
    # sum p^2 = sum e^(2 (z - m)) / (sum e^(z - m))^2.
    squares = None if running.squares is None else running.squares / running.mass.square()
    values = [
        None if running.chosen is None else running.chosen - anchor - log_mass,
        entropy,
        anchor + log_mass if LSE in asked else None,
        None if running.total is None else running.total / plan.vocabulary,
        squares,
    ]
    return values, (anchor, log_mass, entropy, squares)  # type: ignore[return-value]


class Slope:
    """The gradient of a tile of logits, from those of the statistics."""

    def __init__(self, plan, gradients, ids, state, factor):  # type: ignore[no-untyped-def]
        by_name = dict(zip(NAMES, gradients, strict=True))
        self.plan = plan
        self.factor = factor
        self.anchor, self.log_mass, entropy, squares = state
        # [T]: d logit / d product of the head, but for the cap's slope 1 - tanh^2, which differs from entry to entry.
        inner = factor[:, 0] if plan.cap is None else factor[:, 0] * (plan.scale / plan.cap)
        a = torch.zeros_like(inner)
        self.ids = ids
        self.hot = self.b = self.c = self.d = None
        if (g := by_name[LOGPROBS]) is not None:
            # d log p_k / dz = e_k - p: -p times the gradient, and the gradient at the token itself.
            a = a - g
            self.hot = g * inner
        if (g := by_name[LSE]) is not None:
            # d logsumexp / dz = p
            a = a + g
        if (g := by_name[ENTROPY]) is not None:
            # dH / dz = -p (log p + H)
            a = a - g * entropy
            self.b = (-g * inner)[:, None]
        if (g := by_name[SQUARES]) is not None:
            # d sum p^2 / dz = 2 p (p - sum p^2)
            a = a - 2 * g * squares
            self.c = (2 * g * inner)[:, None]
        if (g := by_name[MEAN]) is not None:
            # d mean / dz = 1 / V
            self.d = (g * inner / plan.vocabulary)[:, None]
        self.a = (a * inner)[:, None]

    def of_products(self, rows: slice, part: slice, products: torch.Tensor) -> torch.Tensor:
        """The gradient of a tile of products [t, v], as `of`, by one kernel; in the type of the products and in their
        place."""
        coefficients = (self.a, self.b, self.c, self.d, self.hot)
        _kernels().gradient_tile(
            products,
            products,
            self.factor[rows],
            (self.anchor[rows], self.log_mass[rows]),
            None if self.hot is None else self.ids[rows],
            tuple(None if values is None else values[rows] for values in coefficients),
            part.start,
            self.plan.inner_factor,
            LOWEST,
        )
        return products

    def of(self, rows: slice, part: slice, z: torch.Tensor, relative: bool, logits: Logits) -> torch.Tensor:
        """The gradient of the head's products in a tile, in a buffer of `logits`; z is overwritten, unless it is the
        kept one."""
        flat = None
        if logits.buffers.slope is not None:
            # [t, v]: 1 - tanh^2, as z = factor x tanh.
            flat = torch.div(z, self.factor[rows], out=shaped(logits.buffers.slope, *z.shape))
            flat.square_().neg_().add_(1)
        if relative:
            # The kept tile is relative to the anchor already, and a second backward pass may read it: a copy, not in
            # place.
            z = torch.sub(z, self.log_mass[rows, None], out=shaped(logits.buffers.logits, *z.shape))
        else:
            z.sub_(self.anchor[rows, None]).sub_(self.log_mass[rows, None])  # the bits of the forward pass
        scratch = logits.scratch(z)
        p = torch.exp(z, out=scratch)
        if self.b is None and self.c is None:
            p.mul_(self.a[rows])
        else:
            inside = z.clamp_(min=LOWEST).mul_(self.b[rows]) if self.b is not None else z.zero_()
            if self.c is not None:
                inside.addcmul_(p, self.c[rows])
            p.mul_(inside.add_(self.a[rows]))
        if self.d is not None:
            p.add_(self.d[rows])
        if self.hot is not None:
            here, local = within(self.ids[rows], part)
            p.scatter_add_(1, local[:, None], torch.where(here, self.hot[rows], 0)[:, None])
        return p if flat is None else p.mul_(flat)


class _Fused(torch.autograd.Function):
    """Statistics of a head; its gradients are accumulated tile by tile."""

    @staticmethod
    def forward(ctx, plan, ids, temperature, *tensors):  # type: ignore[no-untyped-def]
        logits = Logits(plan, temperature, tensors[: plan.terms], tensors[plan.terms :])
        tokens = len(tensors[0])
        keep = None
        running = Running(plan, ids, tokens, logits.factor)
        for part, rows_of_part in tiles(tokens, plan):
            weights = logits.columns(part)
            for rows in rows_of_part:
                if plan.kernels:
                    running.add_products(rows, part, logits.products(rows, part, weights), logits.factor)
                    continue
                z = logits.tile(rows, part, weights)
                running.add(rows, part, z, logits.scratch(z))
                keep = z
        values, state = finish(plan, running)
        ctx.plan = plan
        # None instead of zeros for statistics that no loss used, so that they cost nothing.
        ctx.set_materialize_grads(False)
        # With one tile `keep` is all logits; with several it is the last one and is of no use.
        kept = keep if fits(tokens, plan) and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(*tensors, temperature, ids, kept, *state)
        ctx.mark_non_differentiable(
            *(v for name, v in zip(NAMES, values, strict=True) if v is not None and not plan.asked[name])
        )
        return tuple(values)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            raise NotImplementedError("the fused LM head has no second derivatives: backward without create_graph")
        plan = ctx.plan
        tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        count = len(needed)
        temperature, ids, kept, *state = tensors[count:]
        weights = tensors[plan.terms : count]
        # Under ZeRO-3 the head may have been partitioned again since the forward pass.
        gather_until_backward_ends(weights)
        logits = Logits(plan, temperature, tensors[: plan.terms], weights, needed[plan.terms :])
        slope = Slope(plan, gradients, ids, state, logits.factor)
        return (None, None, None, *_gradients(logits, slope, kept, needed))


def _gradients(
    logits: Logits, slope: Slope, kept: torch.Tensor | None, needed: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Gradients of the inputs and of the weights, None where they are not needed."""
    inputs = logits.inputs
    weights = logits.weights
    plan = logits.plan
    wide = [
        torch.zeros_like(x, dtype=logits.dtype) if need else None
        for x, need in zip(inputs, needed[: plan.terms], strict=True)
    ]
    whole = [torch.zeros_like(w) if need else None for w, need in zip(weights, needed[plan.terms :], strict=True)]
    for part, rows_of_part in tiles(len(inputs[0]), plan):
        columns = logits.columns(part)
        sums = [
            None if w is None else logits.sums_in(buffer, w[part])
            for buffer, w in zip(logits.buffers.sums, whole, strict=True)
        ]
        for rows in rows_of_part:
            if plan.kernels:
                dz = slope.of_products(rows, part, logits.products(rows, part, columns))
            else:
                z = kept if kept is not None else logits.tile(rows, part, columns)
                dz = slope.of(rows, part, z, kept is not None, logits)
            if not weights and wide[0] is not None:
                wide[0][rows, part] = dz
            # The products of the backward pass run in the type of the inputs, their sums in float32.
            low = logits.narrowed(dz)
            for into, column in zip(wide, columns, strict=False):
                if into is not None:
                    logits.add_product(into[rows], low, column)
            for into, x in zip(sums, inputs, strict=False):
                if into is not None:
                    logits.add_product(into, low.t(), x[rows])
        for w, total in zip(whole, sums, strict=True):
            if w is not None and total is not None and total.dtype != w.dtype:
                w[part] = total
    narrow = [None if g is None else g.to(x.dtype) for g, x in zip(wide, inputs, strict=True)]
    return [*narrow, *whole]
