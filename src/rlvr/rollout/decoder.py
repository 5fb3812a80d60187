"""Prompts and decoding steps in few operations for decoder blocks of the Llama family; other models go through their
own modules.

A step of one token a row is mostly overhead in a general module: masks are built, keys repeated, weights cast. Here the
same arithmetic is done over weights that were taken once, joined where they have one input and cast where they are kept
in another type than is computed in. An adapter, a hook or a quantised layer is called as it is.

Invariants:
- A model is decoded here only after a trial against its own modules (`rlvr.rollout.decoder_trial`). Otherwise its
  modules do it, and the log says why.
- What is computed with is what the modules held when the engine last took new weights, or when it last began to read
  prompts without a row in progress: within a request that is one and the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlvr.policy import Policy
from rlvr.rollout.aligned_cache import RowCache, read_by_modules
from rlvr.rollout.decoder_parts import BlockParts, NormPart, UnfitError, model_parts
from rlvr.rollout.rows import CachePlan, LayerShape, RowsCache, SlotCache, aligned

log = logging.getLogger(__name__)

# A budget, not a measured optimum: copying them for each batch that begins is little beside reading a prompt.
COPIED = 1 << 22
"""Weights (16 MiB in float32) that may be copied to join products where they are of the right type already."""
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Attention = Callable[[torch.Tensor, "DecoderBlock"], torch.Tensor]
"""Values [N, heads x D] from queries, keys and values [N, heads + 2 shared, D] of a block; keys and values are kept."""
Masks = Mapping[int | None, torch.Tensor | None]
"""Numbers added to the scores, or true where a token is seen, by sliding window (None: none); None: all is seen."""


class Decoder:
    """Next-token logits of `policy`, and the keys and values of its rows.

    `find` gives the short way once it was found equal, and raises UnfitError otherwise.
    """

    def __init__(self, policy: Policy, find: Callable[[Policy], Steps]) -> None:
        self.policy = policy
        self._find = find
        self.steps: Steps | None = None
        """The short way, once it was tried and found equal."""
        self.stale = True
        """True if the weights have changed since they were taken."""
        self._tried = False

    def try_steps(self) -> None:
        """Find out whether the short way gives what the model gives; once."""
        if self._tried:
            return
        self._tried = True
        try:
            self.steps = self._find(self.policy)
        except UnfitError as reason:
            kind = type(self.policy.causal_lm).__name__
            log.info("rollout.engine hf: %s is decoded by its own modules: %s", kind, reason)

    def read(
        self, prompts: Sequence[Sequence[int]], source: np.ndarray, plan: CachePlan, joins: bool
    ) -> tuple[torch.Tensor, RowsCache]:
        """Float32 logits [P, V] after P prompts, and a cache in which row r is prompt `source[r]`.

        `plan` is what the batch may need. `joins`: the rows are to be added to others, which are in progress.
        """
        self.try_steps()
        # A batch begins: nothing says that the weights are those of the last one.
        self.stale |= not joins
        if self.steps is None:
            return read_by_modules(self.policy, prompts, source, plan)
        self._refresh(self.steps)
        ids, last = aligned(prompts)
        if joins:  # rows that are copied to those in progress
            cache = self.steps.cache(CachePlan(len(source), plan.slots), ids.shape[1])
        else:
            cache = self.steps.cache(plan, plan.slots)
        device = self.policy.device
        inputs = (torch.from_numpy(values).to(device) for values in (ids, last, source))
        return self.steps.read(cache, *inputs), cache

    def next_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, places: np.ndarray, cache: RowsCache
    ) -> torch.Tensor:
        """Float32 logits [R, V] after tokens [R] at `positions` [R]; their keys and values are added to the cache.

        `places` are the positions of the rows that are not finished, on the host.
        """
        if isinstance(cache, RowCache):
            # Some models warn where they are given no mask.
            seen = cache.seen(cache.length + 1, ids.device)
            return self.policy.next_logits(ids[:, None], seen, positions[:, None], cache)
        assert self.steps is not None and isinstance(cache, SlotCache)
        self._refresh(self.steps)
        largest = int(places.max())
        slot = largest if largest == int(places.min()) else None
        return self.steps.next_logits(ids, positions, largest + 1, slot, cache)

    def release(self) -> None:
        """Hold no copies of weights until the next prompt or step."""
        self.stale = True
        if self.steps is not None:
            self.steps.release()

    def _refresh(self, steps: Steps) -> None:
        if self.stale:
            self.stale = False
            steps.refresh()


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
        self.copies = sum(block.copied for block in self.blocks) <= COPIED
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
        attend = PromptAttention(cache, source, prompts, self._prompt_masks(every))
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

    def _prompt_masks(self, every: torch.Tensor) -> Masks:
        """True where a token [L, L] of a prompt sees another. None for plain causal attention."""
        masks: dict[int | None, torch.Tensor | None] = {None: None}
        for window in {block.window_at(len(every)) for block in self.blocks}:
            if window is not None:
                behind = every[:, None] - every
                masks[window] = (behind >= 0) & (behind < window)
        return masks

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
    """Causal attention of prompts [P, L], whose keys and values become those of rows."""

    cache: SlotCache
    source: torch.Tensor
    prompts: int
    masks: Masks

    def __call__(self, joined: torch.Tensor, block: DecoderBlock) -> torch.Tensor:
        """Values [P x L, heads x D] from queries, keys and values [P x L, heads + 2 shared, D]."""
        tokens = len(joined)
        # by_head: [P, heads + 2 shared, L, D]
        by_head = joined.view(self.prompts, tokens // self.prompts, -1, block.size).transpose(1, 2)
        pairs = by_head[:, block.heads :].unflatten(1, (2, block.shared))
        self.cache.place(block.number, pairs, self.source)
        q = by_head[:, : block.heads]
        keys, values = pairs.unbind(1)
        if block.heads != block.shared:  # of one layer's prompts, for kernels that want as many keys as queries
            keys = keys.repeat_interleave(block.heads // block.shared, 1)
            values = values.repeat_interleave(block.heads // block.shared, 1)
        mask = self.masks[block.window_at(q.shape[2])]
        attended = nn.functional.scaled_dot_product_attention(
            q, keys, values, mask, is_causal=mask is None, scale=block.scale
        )
        by_token = attended.transpose(1, 2)
        if block.by_group:
            by_token = by_token.unflatten(2, (block.shared, -1)).transpose(2, 3)
        return by_token.reshape(tokens, -1)


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
        self._weight: torch.Tensor | None = None
        """[in, out]"""
        self._bias: torch.Tensor | None = None

    @property
    def copied(self) -> int:
        """Numbers that are copied to make them one, beside those that have to be cast."""
        if len(self.modules) > 1 and self._plain and not self._casts():
            return sum(m.weight.numel() for m in self.modules)
        return 0

    @property
    def _plain(self) -> bool:
        return all(type(m) is nn.Linear and not hooked(m) for m in self.modules)

    def _casts(self) -> bool:
        return any(m.weight.dtype != self._dtype for m in self.modules)

    def refresh(self, copies: bool) -> None:
        """Take the weights as they are now; several of the right type only where `copies` allows to copy them."""
        self.release()
        if not self._plain or (len(self.modules) > 1 and not copies and not self._casts()):
            return
        # nn.Linear holds [out, in]; torch.mm and addmm take [in, out]
        self._weight = self._side_by_side([m.weight.detach() for m in self.modules]).t()
        if any(m.bias is not None for m in self.modules):
            there = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias.detach() for m in self.modules]
            self._bias = self._side_by_side(there)

    def _side_by_side(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        # Cast first: no joined copy in the old type exists beside the new one.
        parts = [tensor.to(self._dtype) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def release(self) -> None:
        """Hold no weights until the next `refresh`."""
        self._weight = self._bias = None

    def take_by_group(self, shared: int, groups: int) -> bool:
        """Take inputs [groups, shared, D] in place of [shared, groups, D], where the weights are a copy anyway."""
        if self._weight is None or not self._casts():
            return False
        self._weight = self._weight.unflatten(0, (shared, groups, -1)).transpose(0, 1).flatten(0, 2)
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, out] of [N, in]."""
        if self._weight is None:
            parts = self._called(x)
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def halves(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The two halves of the product, each [N, out / 2]."""
        if self._weight is None and len(self.modules) == 2:
            return self._called(x)
        return self(x).chunk(2, -1)

    def _called(self, x: torch.Tensor) -> list[torch.Tensor]:
        with self._autocast():
            return [module(x).to(self._dtype) for module in self.modules]

    def onto(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base` + the product, in the type of `base`, which may be changed."""
        if self._weight is None or base.dtype != self._dtype:
            return base.add_(self(x))
        # The residual is added by the product itself: one operation and one tensor less.
        sums = torch.addmm(base, x, self._weight)
        return sums if self._bias is None else sums.add_(self._bias)


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
