"""Prompts and decoding steps in few operations for decoder blocks of the Llama family; other models go through their
own modules.

A step of one token a row is mostly overhead in a general module: masks are built, keys repeated, weights cast. Here the
same arithmetic is done over weights that were taken once (`rlvr.rollout.decoder_products`), joined where they have one
input and cast where they are kept in another type than is computed in.

Invariants:
- A model is decoded here only after a trial against its own modules (`rlvr.rollout.decoder_trial`). Otherwise its
  modules do it, and the log says why.
- What is computed with is what the modules held when the engine last took new weights, or when it last began to read
  prompts without a row in progress: within a request that is one and the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rlvr.policy import Policy
from rlvr.policy.attention.causal_rows import CausalRows
from rlvr.rollout.aligned_cache import RowCache, read_by_modules
from rlvr.rollout.decoder_parts import BlockParts, UnfitError, model_parts
from rlvr.rollout.decoder_products import Autocast, MatrixProduct, Norm, by_parts
from rlvr.rollout.rows import CachePlan, LayerShape, RowsCache, SlotCache, aligned

log = logging.getLogger(__name__)

# A budget, not a measured optimum: copying them for each batch that begins is little beside reading a prompt.
COPIED = 1 << 22
"""Weights (16 MiB) that may be copied to join products in float32. In bfloat16 any number may: there the memory plan
counts a copy of the weights that train, which are mostly kept in float32 and cast."""
Attention = Callable[[torch.Tensor, "DecoderBlock"], torch.Tensor]
"""Values [N, heads x D] from queries, keys and values [N, heads + 2 shared, D] of a block; keys and values are kept."""
Masks = Mapping[int | None, torch.Tensor | None]
"""Numbers added to the scores by sliding window (None: none); None: all is seen."""


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
        attend = PromptAttention(cache, source, CausalRows(prompts, length, ids.device))
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
    """Causal attention of prompts [P, L], whose keys and values become those of rows."""

    cache: SlotCache
    source: torch.Tensor
    rows: CausalRows

    def __call__(self, joined: torch.Tensor, block: DecoderBlock) -> torch.Tensor:
        """Values [P x L, heads x D] from queries, keys and values [P x L, heads + 2 shared, D]."""
        # by_token: [P, L, heads + 2 shared, D]; pairs: [P, L, 2, shared, D]
        by_token = joined.view(self.rows.rows, self.rows.length, -1, block.size)
        pairs = by_token[:, :, block.heads :].unflatten(2, (2, block.shared))
        self.cache.place(block.number, pairs.permute(0, 2, 3, 1, 4), self.source)
        keys, values = pairs.unbind(2)
        attended = self.rows.attend(by_token[:, :, : block.heads], keys, values, block.scale, block.window)
        if block.by_group:
            attended = attended.unflatten(2, (block.shared, -1)).transpose(2, 3)
        return attended.reshape(len(joined), -1)
