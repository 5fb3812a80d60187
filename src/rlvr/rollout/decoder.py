"""Prompts and decoding steps in few operations for decoder blocks of the Llama family; other models go through their
own modules.

A step of one token a row is mostly overhead in a general module: masks are built, keys repeated, weights cast. Here the
same arithmetic is done over weights that were taken once (`rlvr.rollout.joined_weights`), joined where they have one
input and cast where they are kept in another type than is computed in. A LoRA layer is its base layer and two narrow
products. An adapter of another kind, a hook or a quantised layer is called as it is.

Invariants:
- A model is decoded here only after a trial against its own modules (`rlvr.rollout.decoder_trial`). Otherwise its
  modules do it, and the log says why.
- What is computed with is what the modules held when the engine last took new weights, or when it last began to read
  prompts without a row in progress: within a request that is one and the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlvr.policy import Policy
from rlvr.policy.adapters import LowRank
from rlvr.policy.attention.causal_rows import CausalRows
from rlvr.rollout.decoder_parts import BlockParts, NormPart, model_parts
from rlvr.rollout.joined_weights import NarrowProducts, by_group, in_place, lora_parts, narrow_products
from rlvr.rollout.rows import CachePlan, LayerShape, SlotCache

# A budget, not a measured optimum: copying them for each batch that begins is little beside reading a prompt.
COPIED = 1 << 22
"""Weights (16 MiB) that may be copied to join products in float32. In bfloat16 any number may: there the memory plan
counts a copy of the weights that train, which are mostly kept in float32 and cast."""
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Attention = Callable[[torch.Tensor, "DecoderBlock"], torch.Tensor]
"""Values [N, heads x D] from queries, keys and values [N, heads + 2 shared, D] of a block; keys and values are kept."""
Masks = Mapping[int | None, torch.Tensor | None]
"""Numbers added to the scores by sliding window (None: none); None: all is seen."""


class Steps:
    """Passes over the parts of a model in `policy.dtype`. The residual stream is in the type of the embedding's
    weights, as in the model under autocast."""

    def __init__(self, policy: Policy) -> None:
        parts = model_parts(policy)
        self.dtype = policy.dtype
        self.rotary = parts.rotary
        self.window = min((window for window in parts.windows if window is not None), default=1 << 30)
        """Tokens that a layer with a sliding window sees."""
        self._scaling = policy.logit_scaling
        self._embed = parts.embed
        self._norm = Norm(parts.norm, self.dtype)
        self._head = MatrixProduct([parts.head], self.dtype, policy.autocast)
        self.blocks = [
            DecoderBlock(block, number, window, self.dtype, policy.autocast)
            for number, (block, window) in enumerate(zip(parts.blocks, parts.windows, strict=True))
        ]
        few = sum(block.copied for block in self.blocks) <= COPIED
        self.copies = few or self.dtype != torch.float32
        self._table = torch.empty(0)

    def refresh(self) -> None:
        """Take the weights as they are now."""
        residual = self._embed.weight.dtype
        self._norm.refresh(residual)
        self._head.refresh(self.copies)
        for block in self.blocks:
            block.refresh(self.copies, residual)

    def release(self) -> None:
        """Hold no copies of weights until the next `refresh`."""
        self._head.release()
        for block in self.blocks:
            block.release()

    def cache(self, plan: CachePlan, slots: int) -> SlotCache:
        """An empty cache of `slots` slots a row."""
        shapes = [LayerShape(block.shared, block.size) for block in self.blocks]
        return SlotCache(shapes, plan, self.dtype, self._embed.weight.device, slots)

    def read(self, cache: SlotCache, ids: torch.Tensor, last: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Float32 logits [P, V] after prompts [P, L], each padded on the right behind its token `last` [P].

        Row r of the empty `cache` gets the keys and values of prompt `source[r]`.
        """
        prompts, length = ids.shape
        every = torch.arange(length, device=ids.device)
        # Rows are causal and begin at slot 0, so what is behind a prompt is never seen.
        rows = None
        if length > self.window or not has_flash(ids.device):
            rows = CausalRows(prompts, length, ids.device)
        attend = PromptAttention(cache, source, prompts, rows)
        x = self._pass(ids.flatten(), every.repeat(prompts), cache.slots, attend)
        cache.placed(len(source), length)
        ends = torch.arange(prompts, device=ids.device) * length + last
        return self._logits(x.index_select(0, ends))

    def next_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: int, slot: int | None, cache: SlotCache
    ) -> torch.Tensor:
        """Float32 logits [R, V] after tokens [R] at `positions` [R], which are kept.

        `slots` is more than the largest position of a row that counts; all positions are `slot`, or it is None.
        """
        cache.clear(slots)
        masks: dict[int | None, torch.Tensor | None] = {None: None}
        for window in {block.window_at(slots) for block in self.blocks}:
            # Without one where all rows have a token in every slot: kernels are quicker then.
            if window is not None or slot is None:
                masks[window] = cache.mask(positions, slots, window)
        attend = NextAttention(cache, positions, slots, slot, masks)
        return self._logits(self._pass(ids, positions, cache.slots, attend))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaling.of_head(self._head(self._norm(x)).float())

    def _pass(self, ids: torch.Tensor, positions: torch.Tensor, slots: int, attend: Attention) -> torch.Tensor:
        """The last hidden states [N, H] of tokens [N], before the final norm."""
        # x: [N, H]; cos, sin: [N, 1, D], broadcast over the heads
        x = self._embed(ids)
        cos, sin = self.angles(positions, slots).split(1, 1)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return x

    def angles(self, positions: torch.Tensor, least: int) -> torch.Tensor:
        """The rotary table's rows [N, 2, D] at these positions: cosines, and sines with the sign that the halves take.

        `least` is a bound of the positions; where it is beyond the table, a larger one is made.
        """
        # _table: [n, 2, D], twice the need, so that it is seldom made
        if len(self._table) < least:
            every = torch.arange(2 * least, device=positions.device)[None]
            # In float32 whatever is computed in, as in the model under autocast.
            cos, sin = self.rotary(torch.zeros(1, 1, 1, device=positions.device), every)
            half = sin.shape[-1] // 2
            # RoFormer (Su et al. 2021, arXiv 2104.09864): x' = x cos + rotate_half(x) sin with rotate_half([a, b]) =
            # [-b, a]. The minus is in the table: a step only swaps the halves.
            self._table = torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)
        return self._table.index_select(0, positions)


class DecoderBlock:
    """One decoder layer: norm, attention, residual, norm, gated feed-forward, residual."""

    def __init__(
        self, parts: BlockParts, number: int, window: int | None, dtype: torch.dtype, autocast: Autocast
    ) -> None:
        self.number = number
        self.window = window
        self.size = parts.size
        self.scale = parts.scale
        self.heads = parts.heads
        self.shared = parts.shared
        self.by_group = False
        """True if the output projection takes the heads that share keys one after the other."""
        self._turned = [self.heads, self.shared]
        self._dtype = dtype
        self._activation = parts.activation
        self.queries = MatrixProduct(parts.queries, dtype, autocast)
        self.gates = MatrixProduct(parts.gates, dtype, autocast)
        self.out = MatrixProduct([parts.out], dtype, autocast)
        self.down = MatrixProduct([parts.down], dtype, autocast)
        self._norms = [Norm(part, dtype) for part in (parts.first_norm, parts.second_norm)]
        self._head_norms = [Norm(part, dtype) for part in parts.head_norms]

    @property
    def copied(self) -> int:
        """Weights that are copied where copies are allowed."""
        return self.queries.copied + self.gates.copied

    def window_at(self, slots: int) -> int | None:
        """The sliding window, None where it cuts nothing off of `slots` slots."""
        if self.window is None or slots <= self.window:
            return None
        return self.window

    def refresh(self, copies: bool, residual: torch.dtype) -> None:
        """Take the weights as they are now; inputs are in the type `residual`."""
        for product in (self.queries, self.out, self.gates, self.down):
            product.refresh(copies)
        # Kernels of attention leave their output so in memory: it is not copied.
        self.by_group = self.out.take_by_group(self.shared, self.heads // self.shared)
        for norm in self._norms:
            norm.refresh(residual)
        for norm in self._head_norms:
            norm.refresh(self._dtype)

    def release(self) -> None:
        """Hold no copies of weights until the next `refresh`."""
        for product in (self.queries, self.out, self.gates, self.down):
            product.release()

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attention) -> torch.Tensor:
        """The block's output [N, H] for inputs [N, H], which may be changed."""
        # x <- x + O attention(norm(x));  x <- x + W_down (act(W_gate n) * W_up n), n = norm(x)
        first, second = self._norms
        x = self.out.onto(x, attend(self._joined(first(x), cos, sin), self))
        gate, up = self.gates.halves(second(x))
        return self.down.onto(x, self._activation(gate) * up)

    def _joined(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [N, heads + 2 shared, D] of normed inputs [N, H], rotated."""
        # joined: [N, heads + 2 shared, D]; both (queries, then keys): [N, heads + shared, D]
        joined = self.queries(x).view(len(x), -1, self.size)
        both = joined.narrow(1, 0, self.heads + self.shared)
        turned = both
        if self._head_norms:
            normed = zip(self._head_norms, both.split_with_sizes(self._turned, 1), strict=True)
            turned = torch.cat([norm(heads) for norm, heads in normed], 1)
        # x' = x cos + swap(x) sin, see `Steps.angles`. In float32 and rounded once, where the rest is in bfloat16.
        half = self.size // 2
        swapped = torch.cat([turned[..., half:], turned[..., :half]], -1)
        torch.addcmul(turned * cos, swapped, sin, out=both)  # Su et al. 2021
        return joined


@dataclass(frozen=True)
class NextAttention:
    """Attention of one new token a row to the row's slots."""

    cache: SlotCache
    positions: torch.Tensor
    slots: int
    slot: int | None
    masks: Masks

    def __call__(self, joined: torch.Tensor, block: DecoderBlock) -> torch.Tensor:
        """Values [R, heads x D] from queries, keys and values [R, heads + 2 shared, D], which are kept."""
        rows = len(joined)
        shared = block.shared
        new = joined[:, block.heads :].view(rows, 2, shared, block.size)
        self.cache.write(block.number, new, self.positions, self.slot)
        # keys, values: [R, shared, slots, D]; mask: [R, 1, 1, slots]
        keys, values = self.cache.used(block.number, self.slots)
        mask = self.masks[block.window_at(self.slots)]
        # The query heads that share keys are rows of one product, so nothing is repeated for them.
        q = joined[:, : block.heads].view(rows, shared, block.heads // shared, block.size)
        if by_parts(q.device, q.dtype):
            scores = (q * block.scale) @ keys.transpose(-1, -2)
            attended = (scores if mask is None else scores.add_(mask)).softmax(-1) @ values
        else:
            attended = nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=block.scale)
        if block.by_group:
            attended = attended.transpose(1, 2)
        return attended.reshape(rows, -1)


@dataclass(frozen=True)
class PromptAttention:
    """Causal attention of P prompts of L tokens, whose keys and values become those of rows.

    Nothing in it has the queries along one dimension and the keys along another.
    """

    cache: SlotCache
    source: torch.Tensor
    prompts: int
    rows: CausalRows | None
    """None: torch's own attention computes them."""

    def __call__(self, joined: torch.Tensor, block: DecoderBlock) -> torch.Tensor:
        """Values [P x L, heads x D] from queries, keys and values [P x L, heads + 2 shared, D]."""
        # by_token: [P, L, heads + 2 shared, D]; pairs: [P, L, 2, shared, D]
        by_token = joined.view(self.prompts, -1, joined.shape[1], block.size)
        pairs = by_token[:, :, block.heads :].unflatten(2, (2, block.shared))
        self.cache.place(block.number, pairs.permute(0, 2, 3, 1, 4), self.source)
        q = by_token[:, :, : block.heads]
        keys, values = pairs.unbind(2)
        if self.rows is not None:
            attended = self.rows.attend(q, keys, values, block.scale, block.window)
        else:
            q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
            attended = nn.functional.scaled_dot_product_attention(
                q, keys, values, is_causal=True, scale=block.scale, enable_gqa=True
            ).transpose(1, 2)
        if block.by_group:
            attended = attended.unflatten(2, (block.shared, -1)).transpose(2, 3)
        return attended.reshape(len(joined), -1)


def has_flash(device: torch.device) -> bool:
    """Return True where torch's own attention, causal and without a window, is flash attention in every type.

    On a GPU it is not in float32: there it multiplies all queries with all keys where heads share keys.
    """
    return device.type == "cpu"


def _taken_apart(module: Any) -> tuple[Any, list[LowRank]]:
    """The module to multiply with, and the low-rank products that are added to it."""
    if type(module) is nn.Linear or hooked(module):
        return module, []
    return lora_parts(module)


def _plain(bases: Sequence[Any]) -> bool:
    return all(type(base) is nn.Linear and not hooked(base) for base in bases)


def by_parts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where several small operations are quicker than torch's fused one.

    Measured on a CPU in float32 only (docs/performance.md, The embedded engine). On a GPU each operation is a launch.
    """
    return device.type == "cpu" and dtype == torch.float32


class MatrixProduct:
    """Linear modules of one input, their outputs side by side, in `dtype`."""

    def __init__(self, modules: Sequence[Any], dtype: torch.dtype, autocast: Autocast) -> None:
        self.modules = list(modules)
        self._dtype = dtype
        self._autocast = autocast
        self._bases: list[Any] = []
        """The modules themselves; of LoRA layers those below."""
        self._weight: torch.Tensor | None = None
        """[in, out] of all bases; None: they are called."""
        self._bias: torch.Tensor | None = None
        self._added: list[NarrowProducts | None] = []
        """Of each base that is called, or one of them all."""

    @property
    def copied(self) -> int:
        """Numbers that are copied to make them one, beside those that have to be cast."""
        bases = [base for base, _ in map(_taken_apart, self.modules)]
        if len(bases) > 1 and _plain(bases) and not self._casts(bases):
            return sum(base.weight.numel() for base in bases)
        return 0

    def _casts(self, bases: Sequence[Any]) -> bool:
        return any(base.weight.dtype != self._dtype for base in bases)

    def refresh(self, copies: bool) -> None:
        """Take the weights as they are now; `copies`: whether weights that train may be copied though they need no
        cast."""
        self.release()
        bases, terms = zip(*map(_taken_apart, self.modules), strict=True)
        self._bases = list(bases)
        joined = self._joined(copies) if _plain(bases) else None
        if joined is None:
            self._added = [narrow_products([own], [len(own[0].up)], self._dtype) if own else None for own in terms]
            return
        # nn.Linear holds [out, in]; torch.mm and addmm take [in, out]
        self._weight = joined.t()
        if any(base.bias is not None for base in bases):
            zeros = [base.weight.new_zeros(len(base.weight)) for base in bases]
            biases = [zero if base.bias is None else base.bias for base, zero in zip(bases, zeros, strict=True)]
            self._bias = torch.cat([bias.detach().to(self._dtype) for bias in biases])
        if any(terms):
            self._added = [narrow_products(terms, [len(base.weight) for base in bases], self._dtype)]

    def _joined(self, copies: bool) -> torch.Tensor | None:
        """The weights [out, in] of all bases in one tensor; None where they have to stay apart."""
        weights = [base.weight for base in self._bases]
        if len(weights) == 1 or self._casts(self._bases):
            # Cast first: no joined copy in the old type exists beside the new one.
            parts = [weight.detach().to(self._dtype) for weight in weights]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        # On a CPU in float32 those of small models are joined, and copied.
        if not by_parts(weights[0].device, self._dtype) and (whole := in_place(weights)) is not None:
            return whole
        return torch.cat([weight.detach() for weight in weights]) if copies else None

    def release(self) -> None:
        """Hold no weights until the next `refresh`."""
        self._weight = self._bias = None
        self._added = []

    def take_by_group(self, shared: int, groups: int) -> bool:
        """Take inputs [groups, shared, D] in place of [shared, groups, D], where that saves a copy of the inputs."""
        if self._weight is None or by_parts(self._weight.device, self._dtype):
            return False
        if groups > 1:
            self._weight = by_group(self._weight, shared, groups)
            self._added = [
                None if added is None else (by_group(added[0], shared, groups), added[1]) for added in self._added
            ]
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out] of [N, in]."""
        if self._weight is None:
            parts = self._called(x)
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self._bias is None:
            return self._adapted(torch.mm(x, self._weight), x)
        return self._adapted(torch.addmm(self._bias, x, self._weight), x)

    def halves(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The two halves of the product, each [N, out / 2]."""
        if self._weight is None and len(self.modules) == 2:
            return self._called(x)
        return self(x).chunk(2, -1)

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base` + the product, in the type of `base`, which may be changed."""
        if self._weight is None or base.dtype != self._dtype:
            return base.add_(self(x))
        # The residual is added by the product itself: one operation and one tensor less.
        sums = torch.addmm(base, x, self._weight)
        return self._adapted(sums if self._bias is None else sums.add_(self._bias), x)

    def _called(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The output of each base, with what its adapter adds."""
        with self._autocast():
            parts = [base(x).to(self._dtype) for base in self._bases]
        return [
            part if added is None else torch.addmm(part, torch.mm(x, added[0]), added[1])
            for part, added in zip(parts, self._added, strict=True)
        ]

    def _adapted(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The joined product, which is changed, with what the adapters add."""
        for added in self._added:
            if added is not None:
                product.addmm_(torch.mm(x, added[0]), added[1])
        return product


# RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467): y = w x / sqrt(mean(x^2) + e). With H channels that is y =
# (sqrt(H) w) x / sqrt(|x|^2 + H e), which is a norm, hypot, a division and a product; sqrt(H) w and sqrt(H e) are
# computed once for the weights.
class Norm:
    """A norm, computed here where it is a plain RMS norm. Its output is in `dtype`."""

    def __init__(self, part: NormPart, dtype: torch.dtype) -> None:
        self.module = part.module
        self._dtype = dtype
        self._epsilon = part.epsilon
        self._parts = False
        self._weight: torch.Tensor | None = None
        """The weight in the type of the input; sqrt(H) x weight where the norm is computed by parts."""
        self._bound = torch.empty(0)
        """sqrt(H x epsilon)"""

    def refresh(self, taken: torch.dtype) -> None:
        """Take the weight as it is now; inputs are in `taken`."""
        self._weight = None
        if self._epsilon is None or hooked(self.module):
            return
        weight = self.module.weight.detach()
        self._parts = by_parts(weight.device, self._dtype)
        if not self._parts:
            self._weight = weight.to(taken)
            return
        self._weight = weight * len(weight) ** 0.5
        self._bound = weight.new_tensor(len(weight) * self._epsilon).sqrt()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of [..., H]."""
        if self._weight is None:
            normed: torch.Tensor = self.module(x)
            return normed.to(self._dtype)
        if self._parts:
            # four operations, of which torch's own rms_norm makes more on a CPU
            return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._bound)).mul_(self._weight)
        return nn.functional.rms_norm(x, self._weight.shape, self._weight, self._epsilon).to(self._dtype)


def hooked(module: Any) -> bool:
    """Return True if something else than the module's own class runs when it is called."""
    # `forward` in the instance's own attributes: accelerate and some patches replace the method of one module.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
