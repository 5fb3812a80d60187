"""Attention of packed rows: runs of tokens laid end to end in one row, each seeing its context and itself, nothing
else.

A `Spans` says which tokens of a row belong together. With it in place (`attending`), every attention layer of a stock
Hugging Face model is computed block by block: runs of similar length side by side, each with the keys of its context in
front of its own. So neither a [row, row] mask nor padding of whole rows exists, and the attention function that the
model was loaded with (sdpa, eager with its soft-caps and sinks) does the arithmetic; under flex_attention the same rule
is one block mask. What a layer may see (sliding window or all) is asked of the model itself, where it makes its masks.

Without spans in place the model computes as it did, from any thread: the hook passes everything on. Whether a model
computes packed rows is not assumed from its name but tried, once, on a few tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rlvr.core.device_memory import to_device

PREFIX = "rlvr_"
BASES = ("sdpa", "eager", "flex_attention")
"""Attention implementations that spans work with."""
# Both are rough balances of padding against calls, not fits: larger values make fewer calls with more padding.
SLACK = 0.25
"""Share of a block's query-key pairs that may be padding before a shorter run begins a block of its own ..."""
SMALL = 1 << 14
"""... unless the padding is fewer pairs than this, which costs less than another call."""


@dataclass(frozen=True)
class Spans:
    """S runs of tokens of one row, in the order they lie there: the row is nothing but them.

    A run's tokens see the tokens of its context, which is another run that has no context itself, and those of their
    own run up to themselves.
    """

    length: np.ndarray
    """int64 [S], none is 0"""
    context: np.ndarray
    """int64 [S], the number of the run that comes before; -1: none"""
    device: torch.device

    @cached_property
    def start(self) -> np.ndarray:
        """int64 [S]: the place of each run's first token."""
        return np.cumsum(self.length) - self.length

    @cached_property
    def context_length(self) -> np.ndarray:
        """int64 [S], 0 where there is none."""
        return np.where(self.context >= 0, self.length[self.context], 0)

    @cached_property
    def positions(self) -> np.ndarray:
        """int64 [N]: the position of each token, counted from the beginning of its context."""
        return np.arange(self.length.sum()) + np.repeat(self.context_length - self.start, self.length)

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The runs of each block."""
        return blocks_of(self.length, self.context_length)

    @cached_property
    def blocks(self) -> list[Block]:
        return [self._block(members) for members in self.members]

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 [N]: where each token's output is, in the blocks' padded outputs laid end to end."""
        where = np.empty(int(self.length.sum()), dtype=np.int64)
        offset = 0
        for block, members in zip(self.blocks, self.members, strict=True):
            for r, s in enumerate(members):
                # Blocks are padded to `queries` slots for each run; offset counts the slots of the blocks before.
                first = offset + r * block.queries
                where[self.start[s] : self.start[s] + self.length[s]] = np.arange(first, first + self.length[s])
            offset += block.rows * block.queries
        (places,) = to_device([where], self.device)
        return places

    def _block(self, members: np.ndarray) -> Block:
        contexts = self.context_length[members]
        longest = int(self.length[members].max())
        context = int(contexts.max())
        # int64 [R, queries] and [R, context]: places in the row.
        own = _padded(self.start[members], self.length[members], longest)
        before = _padded(self.start[self.context[members]], contexts, context)
        # int64 [R, context + queries]: the context's keys come first, each run's own after them.
        keys = np.concatenate([before, own], axis=1)
        if (contexts == context).all():
            # One mask row for all runs, which broadcasts, where nothing of the context is padding.
            each = contexts[:1]
        else:
            each = contexts
        take_queries, take_keys, context_length = to_device([own.ravel(), keys.ravel(), each], self.device)
        return Block(len(members), longest, context, take_queries, take_keys, context_length)

    def block_mask(self, window: int | None) -> Any:
        """The same rule as a block mask of flex_attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        numbers = np.repeat(np.arange(len(self.length)), self.length)
        contexts = np.repeat(self.context, self.length)
        own, context, position = to_device([numbers, contexts, self.positions], self.device)

        def visible(batch: Any, head: Any, q: Any, k: Any) -> Any:
            # Causal within the run, and all of its context, which lies before it in the row.
            seen = ((own[q] == own[k]) & (k <= q)) | (context[q] == own[k])
            if window is None:
                return seen
            return seen & (position[q] - position[k] < window)

        size = len(self.positions)
        return create_block_mask(visible, None, None, size, size, self.device, _compile=self.device.type == "cuda")


def blocks_of(length: np.ndarray, context: np.ndarray) -> list[np.ndarray]:
    """Runs that are attended to side by side: in each block contexts and lengths are alike, and little is padding."""
    blocks: list[list[int]] = []
    longest = widest = real = 0
    # Longest context first and in it the longest run, so that neighbours are alike in both and little is padded.
    for s in np.lexsort((-length, -context)):
        own = int(length[s])
        before = int(context[s])
        # Runs without a context get blocks of their own: these are plain causal attention and need no mask.
        if blocks and (before > 0) == (widest > 0):
            top = max(longest, own)
            pairs = (len(blocks[-1]) + 1) * top * (top + widest)
            waste = pairs - real - own * (own + before)
            if waste <= max(SMALL, SLACK * pairs):
                blocks[-1].append(int(s))
                longest = top
                real = real + own * (own + before)
                continue
        blocks.append([int(s)])
        longest = own
        widest = before
        real = own * (own + before)
    return [np.asarray(block) for block in blocks]


def _padded(start: np.ndarray, length: np.ndarray, longest: int) -> np.ndarray:
    """int64 [R, longest]: the places of each run's tokens, then those of some token as padding."""
    steps = np.arange(longest)
    # Place 0 is a real token: as a key it is masked out, and the output of a padded query is taken by nobody.
    return np.where(steps < length[:, None], start[:, None] + steps, 0)


@dataclass
class Block:
    """R runs side by side, padded on the right to `queries` tokens, with contexts padded to `context` tokens before."""

    rows: int
    queries: int
    context: int
    take_queries: torch.Tensor
    """int64 [R * queries], places in the row"""
    take_keys: torch.Tensor
    """int64 [R * (context + queries)]"""
    context_length: torch.Tensor
    """int64 [R], or [1] where all are the same"""
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def visible(self, window: int | None) -> torch.Tensor | None:
        """bool [R or 1, 1, queries, context + queries]; None where it is plain causal attention."""
        # A window that covers every key is none, so that layers with and without it share a mask.
        if window is not None and window >= self.context + self.queries:
            window = None
        if window not in self._masks:
            self._masks[window] = self._visible(window)
        return self._masks[window]

    def _visible(self, window: int | None) -> torch.Tensor | None:
        if window is None and not self.context:
            return None
        device = self.take_keys.device
        # [R or 1, 1, 1], against q [queries, 1] and k [context + queries].
        before = self.context_length[:, None, None]
        q = torch.arange(self.queries, device=device)[:, None]
        k = torch.arange(-self.context, self.queries, device=device)  # own tokens from 0 on
        # Columns k < 0 are the context's, of which each run has the first `before`; the others are its own, causal.
        seen = torch.where(k < 0, k + self.context < before, k <= q)
        if window is not None:
            # Position of the query less that of the key: k + context is the position in the context, before + q that of
            # the query.
            distance = torch.where(k < 0, before + q - k - self.context, q - k)
            seen = seen & (distance < window)
        return seen[:, None]

    def attend(self, base: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> torch.Tensor:
        """The outputs of the block's padded queries, [R * queries, heads, head size]."""
        q = self._take(query, self.take_queries)
        k = self._take(key, self.take_keys)
        v = self._take(value, self.take_keys)
        return base(module, q, k, v, mask, **more)[0].flatten(0, 1)

    def _take(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[1, heads, N, D] -> [R, heads, index's share, D]"""
        return x[0].index_select(1, index).unflatten(1, (self.rows, -1)).transpose(0, 1)


@dataclass(frozen=True)
class _RowMask:
    """The mask of a layer while spans are in place."""

    spans: Spans
    window: int | None

    @cached_property
    def blocks(self) -> Any:
        """For flex_attention; the same for all layers with this window."""
        return self.spans.block_mask(self.window)


# A context variable: a forward pass on another thread, of an engine that samples, say, sees no spans.
_spans: ContextVar[Spans | None] = ContextVar("spans", default=None)


@contextlib.contextmanager
def attending(spans: Spans | None) -> Iterator[None]:
    """Inside, a forward pass of a hooked model in this thread, over one row, attends as `spans` say. None: as ever."""
    token = _spans.set(spans)
    try:
        yield
    finally:
        _spans.reset(token)


def hook(model: Any) -> None:
    """Let `model` attend by spans; without spans it computes as before. Its attention must be one of BASES."""
    base = model.config._attn_implementation
    name = PREFIX + base
    AttentionInterface.register(name, partial(_attend, base))
    AttentionMaskInterface.register(name, partial(_mask, base))
    model.set_attn_implementation(name)


def unhook(model: Any) -> None:
    """Undo `hook`."""
    model.set_attn_implementation(model.config._attn_implementation.removeprefix(PREFIX))


def _mask(base: str, **arguments: Any) -> Any:
    spans = _spans.get()
    if spans is None:
        return AttentionMaskInterface()[base](**arguments)
    # transformers asks for vmap where a model adds a mask function of its own; then `Spans` would leave its part out.
    if arguments.get("use_vmap"):
        raise NotImplementedError("the model adds to the causal mask")
    return _RowMask(spans, arguments.get("local_size"))


def _attend(
    base: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **more: Any,
) -> tuple[torch.Tensor, Any]:
    """The attention function of a hooked model; shapes [1, heads, N, D] -> [1, N, heads, D] under spans."""
    if base == "eager":
        # Each model file has its own eager function (soft-caps and sinks are in it), which transformers does not
        # register.
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = AttentionInterface()[base]
    if not isinstance(attention_mask, _RowMask):
        return function(module, query, key, value, attention_mask, **more)
    spans = attention_mask.spans
    window = attention_mask.window
    if base == "flex_attention":
        return function(module, query, key, value, attention_mask.blocks, **more)
    outputs = []
    for block in spans.blocks:
        mask = block.visible(window)
        if base == "eager":
            mask = _additive(block, mask, query)
        outputs.append(block.attend(function, module, query, key, value, mask, **more))
    # [sum of R * queries, heads, D] -> [1, N, heads, D]: the outputs back in the order of the row, padding dropped.
    return torch.cat(outputs).index_select(0, spans.places)[None], None


def _additive(block: Block, seen: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """The mask as eager attention takes it: added to the scores, plain causal attention spelt out."""
    if seen is None:
        seen = torch.ones(1, 1, block.queries, block.queries, dtype=torch.bool, device=query.device).tril()
    return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~seen, torch.finfo(query.dtype).min
    )


@dataclass(frozen=True)
class Packing:
    """Packed rows that a model can compute, and the reason where it cannot."""

    packs: bool
    shares: bool
    reason: str = ""


def try_packing(model: Any, hidden_states: Callable[..., torch.Tensor], tolerance: float) -> Packing:
    """Hook `model` and compare a packed row with a shared prefix to the rows apart; where they differ, unhook it again.

    `hidden_states(input_ids, position_ids, spans)` runs the model; `tolerance` is relative to the largest of them.
    """
    config = model.config.get_text_config()
    base = model.config._attn_implementation or "none"
    special = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if special:
        return Packing(False, False, f"its layers are of type {', '.join(sorted(special))}")
    if base.startswith("flash_attention"):
        reason = f"model.attention {base} cannot share prefixes, sdpa and flex_attention can"
        return Packing(not _disagree(hidden_states, model, tolerance, shared=False), False, reason)
    if base not in BASES:
        return Packing(False, False, f"its attention is {base!r}, not one of {', '.join(BASES)}")
    hook(model)
    trouble = _disagree(hidden_states, model, tolerance, shared=True)
    if trouble:
        unhook(model)
    return Packing(not trouble, not trouble, trouble)


def _disagree(hidden_states: Callable[..., torch.Tensor], model: Any, tolerance: float, shared: bool) -> str:
    """Why a packed row of two short rollouts is not computed as they are apart; empty where it is."""
    weight = model.get_input_embeddings().weight
    device = weight.device
    # [10]: a shared prefix of 4 and two responses of 3. Any ids that differ would do; modulo the vocabulary they exist.
    ids = (torch.arange(10, device=device) * 7 + 3) % weight.shape[0]
    apart = torch.stack([torch.cat([ids[:4], ids[4:7]]), torch.cat([ids[:4], ids[7:]])])
    steps = torch.arange(7, device=device)
    if shared:
        # Runs 1 and 2 have run 0 as their context.
        spans = Spans(np.asarray([4, 3, 3]), np.asarray([-1, 0, 0]), device)
    else:
        # Flash attention tells packed rows apart by position ids that start again at 0.
        spans = None
    together = ids if shared else apart.flatten()
    positions = torch.cat([steps, steps[4:] if shared else steps])
    try:
        want = hidden_states(apart, steps.expand(2, -1)).flatten(0, 1).float()
        got = hidden_states(together[None], positions[None], spans)[0].float()
    # Wide, since the model may be any code from the hub: whatever it fails with, rows are padded and the log says why.
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
        return f"a packed row fails in it ({type(error).__name__}: {str(error)[:200]})"
    if shared:
        # [14, H] -> [10, H]: the second row's copy of the prefix is computed once only in the packed row.
        want = torch.cat([want[:7], want[11:]])
    if float((got - want).abs().max()) <= tolerance * float(want.abs().max()):
        return ""
    return (
        "a packed row does not give it the hidden states of separate rows (it carries a state along the row, perhaps)"
    )
