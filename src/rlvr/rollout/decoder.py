"""Prompts and decoding steps in few operations, over the parts of a model's blocks; models of other forms go through
their own modules.

A step of one token a row is mostly overhead in a general module: masks are built, keys repeated, weights cast. Here the
same arithmetic is done over weights that were taken once (`rlvr.rollout.decoder_products`), joined where they have one
input and cast where they are kept in another type than is computed in. A LoRA layer is its base layer and two narrow
products. An adapter of another kind, a hook or a quantised layer is called as it is, and so is a feed-forward part that
is not two gated projections, such as a mixture of experts.

Invariants:
- A model is decoded here only after a trial against its own modules (`rlvr.rollout.decoder_trial`). Otherwise its
  modules do it, and the log says why.
- What is computed with is what the modules held when the engine last took new weights, or when it last began to read
  prompts without a row in progress: within a request that is one and the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlvr.policy import Policy
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.causal_rows import CausalRows
from rlvr.rollout.decoder_parts import BlockParts, NormPart, model_parts
from rlvr.rollout.decoder_products import Autocast, FeedForward, MatrixProduct, Norm, by_parts, feed_forward, scores
from rlvr.rollout.rows import CachePlan, LayerShape, SlotCache

# A budget, not a measured optimum: copying them for each batch that begins is little beside reading a prompt.
COPIED = 1 << 22
"""Weights (16 MiB) that may be copied to join products in float32. In bfloat16 any number may: there the memory plan
counts a copy of the weights that train, which are mostly kept in float32 and cast."""
Attention = Callable[[torch.Tensor, "DecoderBlock"], torch.Tensor]
"""Values [N, heads x D] from queries, keys and values [N, heads + 2 shared, D] of a block; keys and values are kept."""
Masks = Mapping[int | None, torch.Tensor | None]
"""Numbers added to the scores by sliding window (None: none); None: all is seen."""
Angles = Mapping["Rotation", tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines [N, 1, W] of the rotary tables, by rotation."""


class Steps:
    """Passes over the parts of a model in `policy.dtype`. The residual stream is in the type of the embedding's
    weights, as in the model under autocast."""

    def __init__(self, policy: Policy, forms: Sequence[RotaryForm] | None = None) -> None:
        """`forms` are those of the layers; None: the first one of all."""
        parts = model_parts(policy)
        forms = forms or [RotaryForm.HALVES] * len(parts.blocks)
        self.dtype = policy.dtype
        self.tables = RotaryTables(parts.rotary)
        self.exact = parts.exact
        """True if the model's attention function computes soft-caps and sinks."""
        self.window = min((window for window in parts.windows if window is not None), default=1 << 30)
        """Tokens that a layer with a sliding window sees."""
        self._scaling = policy.logit_scaling
        self._embed = parts.embed
        self._multiplier = parts.multiplier
        self._norm = Norm(parts.norm, self.dtype)
        self._head = MatrixProduct([parts.head], self.dtype, policy.autocast)
        self.blocks = [
            DecoderBlock(block, number, window, Rotation(form, layer_type), self.dtype, policy.autocast)
            for number, (block, window, form, layer_type) in enumerate(
                zip(parts.blocks, parts.windows, forms, parts.layer_types, strict=True)
            )
        ]
        self._rotations = {block.rotation for block in self.blocks if block.rotation.form is not RotaryForm.NONE}
        few = sum(block.copied for block in self.blocks) <= COPIED
        self.copies = few or self.dtype != torch.float32

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
        if length > self.window or not has_flash(ids.device) or any(map(is_special, self.blocks)):
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
        # x: [N, H]
        x = self._embed(ids)
        if self._multiplier != 1.0:
            x = x * self._multiplier
        angles = {rotation: self.tables.angles(rotation, positions, slots) for rotation in self._rotations}
        for block in self.blocks:
            x = block(x, angles, attend)
        return x


class DecoderBlock:
    """One decoder layer: attention and a feed-forward part, each added to the layer's input, with norms before, after
    or on both sides of them."""

    def __init__(
        self,
        parts: BlockParts,
        number: int,
        window: int | None,
        rotation: Rotation,
        dtype: torch.dtype,
        autocast: Autocast,
    ) -> None:
        self.number = number
        self.window = window
        self.rotation = rotation
        self.size = parts.size
        self.scoring: ScoreRule = parts.scoring
        self.heads = parts.heads
        self.shared = parts.shared
        self.sinks: torch.Tensor | None = None
        """A score of each head [heads] that has no value, in float32."""
        self.by_group = False
        """True if the output projection takes the heads that share keys one after the other."""
        self._parts = parts
        self._turned = [self.heads, self.shared]
        self._dtype = dtype
        self.queries = MatrixProduct(parts.queries, dtype, autocast)
        self.out = MatrixProduct([parts.out], dtype, autocast)
        self.feed_forward = feed_forward(parts.feed_forward, dtype, autocast)
        norms = parts.norms
        self._parallel = norms.parallel
        self._before = _norm(norms.before_attention, dtype)
        self._between = _norm(norms.before_feed_forward, dtype)
        self._after = [_norm(part, dtype) for part in (norms.after_attention, norms.after_feed_forward)]
        self._head_norms = [Norm(part, dtype) for part in parts.head_norms]

    @property
    def copied(self) -> int:
        """Weights that are copied where copies are allowed."""
        return self.queries.copied + self.feed_forward.copied

    def window_at(self, slots: int) -> int | None:
        """The sliding window, None where it cuts nothing off of `slots` slots."""
        if self.window is None or slots <= self.window:
            return None
        return self.window

    def refresh(self, copies: bool, residual: torch.dtype) -> None:
        """Take the weights as they are now; inputs are in the type `residual`."""
        for product in (self.queries, self.out, self.feed_forward):
            product.refresh(copies)
        # Kernels of attention leave their output so in memory: it is not copied.
        self.by_group = self.out.take_by_group(self.shared, self.heads // self.shared)
        for norm in (self._before, self._between):
            if norm is not None:
                norm.refresh(residual)
        for norm in (*self._after, *self._head_norms):
            if norm is not None:
                norm.refresh(self._dtype)
        if self._parts.sinks is not None:
            self.sinks = self._parts.sinks.detach().float()

    def release(self) -> None:
        """Hold no copies of weights until the next `refresh`."""
        for product in (self.queries, self.out, self.feed_forward):
            product.release()

    def __call__(self, x: torch.Tensor, angles: Angles, attend: Attention) -> torch.Tensor:
        """The block's output [N, H] for inputs [N, H], which may be changed."""
        # x <- x + c post(O attention(pre(x))), then x <- x + c post(F(pre(x))); in a parallel block F takes the first
        # pre(x). Norms that a model does not have are left out, and c is 1 but in Granite.
        normed = x.to(self._dtype) if self._before is None else self._before(x)
        after_attention, after_feed_forward = self._after
        x = self._added(x, self.out, attend(self._joined(normed, angles), self), after_attention)
        if not self._parallel:
            normed = x.to(self._dtype) if self._between is None else self._between(x)
        return self._added(x, self.feed_forward, normed, after_feed_forward)

    def _added(
        self, x: torch.Tensor, part: MatrixProduct | FeedForward, taken: torch.Tensor, after: Norm | None
    ) -> torch.Tensor:
        """`x`, which may be changed, + what a part gives, normed if there is a norm after it."""
        if after is None and self._parts.multiplier == 1.0:
            return part.onto(x, taken)
        given = part(taken)
        if after is not None:
            given = after(given)
        return x.add_(given, alpha=self._parts.multiplier)

    def _joined(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Queries, keys and values [N, heads + 2 shared, D] of normed inputs [N, H], rotated."""
        # joined: [N, heads + 2 shared, D]; both (queries, then keys): [N, heads + shared, D]
        joined = self.queries(x).view(len(x), -1, self.size)
        both = joined.narrow(1, 0, self.heads + self.shared)
        turned = both
        if self._head_norms and not self._parts.norms_after_rotation:
            turned = self._normed(both)
        if self.rotation.form is not RotaryForm.NONE:
            self._rotate(turned, both, angles[self.rotation])
        elif turned is not both:
            both.copy_(turned)
        if self._head_norms and self._parts.norms_after_rotation:
            both.copy_(self._normed(both))
        return joined

    def _normed(self, both: torch.Tensor) -> torch.Tensor:
        """Queries and keys [N, heads + shared, D], normed."""
        parts = both.split_with_sizes(self._turned, 1)
        if self._parts.norms_of_all_heads:
            # The channels of all heads side by side, [N, heads x D].
            flat = zip(self._head_norms, parts, strict=True)
            return torch.cat([norm(heads.flatten(1)).view(heads.shape) for norm, heads in flat], 1)
        return torch.cat([norm(heads) for norm, heads in zip(self._head_norms, parts, strict=True)], 1)

    def _rotate(self, turned: torch.Tensor, both: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write `turned`, rotated, to `both`, each [N, heads + shared, D]; they may be one tensor."""
        # cos, sin: [N, 1, W], broadcast over the heads. Channels from W on are not rotated.
        cos, sin = angles
        width = cos.shape[-1]
        target = both
        if width < self.size:
            if turned is not both:
                both[..., width:] = turned[..., width:]
            turned, target = turned[..., :width], both[..., :width]
        # In float32 and rounded once, where the rest is in bfloat16.
        torch.addcmul(turned * cos, self.rotation.swapped(turned), sin, out=target)  # Su et al. 2021


def _norm(part: NormPart | None, dtype: torch.dtype) -> Norm | None:
    return None if part is None else Norm(part, dtype)


# Rotary angles --------------------------------------------------------------------------------------------------------

# RoFormer (Su et al. 2021, arXiv:2104.09864) turns pairs of channels (a, b) into (a cos - b sin, b cos + a sin). Models
# pair channels in different ways, and their rotary modules give the angles in different layouts. Here x' = x cos +
# swap(x) sin for all of them: the minus is in the table, so a step only swaps each pair.


class RotaryForm(enum.Enum):
    """Pairs of channels, and the layout of the angles that the model's rotary module gives."""

    HALVES = "halves"
    """Channel i and i + D/2, angles [A, A] (Llama)."""
    HALVES_ONCE = "halves, angles once"
    """The same, angles [A] (gpt-oss)."""
    NEIGHBOURS = "neighbours"
    """Channels 2i and 2i + 1, each angle twice in a row (Cohere)."""
    NEIGHBOURS_FROM_HALVES = "neighbours, angles as halves"
    """The same, angles [A, A] (GLM-4)."""
    NONE = "none"
    """No rotation (some layers of SmolLM3, EXAONE 4 and Cohere 2)."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of a layer."""

    form: RotaryForm
    layer_type: str | None
    """The type of the layer where angles differ by it; else None."""

    def table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, 2, W] from the rotary module's cosines and sines [n, w]: cosines, and sines with the sign of their
        channel."""
        # The angle of each pair, [n, W / 2].
        angles = [cos, sin]
        if self.form in (RotaryForm.HALVES, RotaryForm.NEIGHBOURS_FROM_HALVES):
            angles = [x[:, : x.shape[1] // 2] for x in angles]
        elif self.form is RotaryForm.NEIGHBOURS:
            angles = [x[:, ::2] for x in angles]
        once, sine = angles
        if self._neighbours:
            return torch.stack([torch.stack([once, once], -1).flatten(1), torch.stack([-sine, sine], -1).flatten(1)], 1)
        return torch.stack([torch.cat([once, once], -1), torch.cat([-sine, sine], -1)], 1)

    def swapped(self, x: torch.Tensor) -> torch.Tensor:
        """Each pair of channels [..., W] swapped."""
        if self._neighbours:
            return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat([x[..., half:], x[..., :half]], -1)

    @property
    def _neighbours(self) -> bool:
        return self.form in (RotaryForm.NEIGHBOURS, RotaryForm.NEIGHBOURS_FROM_HALVES)


class RotaryTables:
    """The angles of all positions up to some length, by the model's rotary module."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary
        self._tables: dict[Rotation, torch.Tensor] = {}

    def angles(self, rotation: Rotation, positions: torch.Tensor, least: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign of their channel, [N, 1, W] at these positions.

        `least` is a bound of the positions; where it is beyond the table, a larger one is made.
        """
        table = self._tables.get(rotation)
        # Twice the need, so that it is seldom made.
        if table is None or len(table) < least:
            every = torch.arange(2 * least, device=positions.device)[None]
            # In float32 whatever is computed in, as in the model under autocast.
            cos, sin = self.of_module(torch.zeros(1, 1, 1, device=positions.device), every, rotation.layer_type)
            table = self._tables[rotation] = rotation.table(cos[0], sin[0])
        cos, sin = table.index_select(0, positions).split(1, 1)
        return cos, sin

    def of_module(
        self, x: torch.Tensor, positions: torch.Tensor, layer_type: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's own cosines and sines [R, L, w] for inputs `x` at positions [R, L]."""
        given = (x, positions) if layer_type is None else (x, positions, layer_type)
        cos, sin = self.rotary(*given)
        return cos, sin


# Attention ------------------------------------------------------------------------------------------------------------


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
        if by_parts(q.device, q.dtype) or is_special(block):
            attended = _attended_by_parts(q, keys, values, mask, block)
        else:
            attended = nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=block.scoring.scale)
        if block.by_group:
            attended = attended.transpose(1, 2)
        return attended.reshape(rows, -1)


def is_special(block: DecoderBlock) -> bool:
    """Return True for attention that torch's own function does not compute: with a soft-cap, or with sinks."""
    return block.scoring.softcap is not None or block.sinks is not None


def _attended_by_parts(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, block: DecoderBlock
) -> torch.Tensor:
    """[R, shared, groups, D], [R, shared, slots, D], [R, shared, slots, D] -> [R, shared, groups, D]"""
    # In float32 as in prompts and in training, for bfloat16 rounds scores from 32 on to quarters.
    # scored: [R, shared, groups, slots]
    if (cap := block.scoring.softcap) is None:
        scored = scores(q, keys, block.scoring.scale)
    else:
        scored = scores(q, keys, block.scoring.scale / cap).tanh_().mul_(cap)
    if mask is not None:
        scored.add_(mask)
    if block.sinks is None:
        return scored.softmax(-1).to(values.dtype) @ values
    # One more score of each head, whose probability goes nowhere.
    sinks = block.sinks.view(1, block.shared, -1, 1).expand(len(q), -1, -1, 1)
    return torch.cat([scored, sinks], -1).softmax(-1)[..., :-1].to(values.dtype) @ values


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
            attended = self.rows.attend(q, keys, values, block.scoring, block.window, block.sinks)
        else:
            q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
            attended = nn.functional.scaled_dot_product_attention(
                q, keys, values, is_causal=True, scale=block.scoring.scale, enable_gqa=True
            ).transpose(1, 2)
        if block.by_group:
            attended = attended.unflatten(2, (block.shared, -1)).transpose(2, 3)
        return attended.reshape(len(joined), -1)


def has_flash(device: torch.device) -> bool:
    """Return True where torch's own attention, causal and without a window, is flash attention in every type.

    On a GPU it is not in float32: there it multiplies all queries with all keys where heads share keys.
    """
    return device.type == "cpu"
