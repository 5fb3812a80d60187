"""Packed rows: runs of tokens laid end to end in one row, which of them see which, and stock Hugging Face models that
attend so.

A row is cut into runs of tokens. A run may continue another run, its context, which may continue a third, and so on:
the runs of a row are trees, and a run that several others continue is laid down and computed once. A token sees its own
run up to itself, and all tokens of the runs that its own continues.

For a layer with full attention, `Spans.segments` gives one call for the runs themselves, causal, and one for each level
of contexts: all queries below a run against the keys of that run, all of which they see. The outputs of these calls are
merged by their log-sum-exp (`rlvr.policy.attention.merged`). For a layer with a sliding window it gives one call, in
which each run has the keys of the window in front of its own.

With spans in place (`attending`), every attention layer of a hooked model is computed by `merged.attend`, whatever
attention function the model was loaded with; caps, sinks and scale are those that the layer passes to its own. The
layer's sliding window is asked of the model itself, where it makes its masks. Without spans in place the model computes
as it did, from any thread: the hook passes everything on.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rlvr.policy.attention.calls import ScoreRule, Segments
from rlvr.policy.attention.kernels import WIDEST
from rlvr.policy.attention.merged import attend
from rlvr.records import Batch

# Both are rough balances of padding against calls, not fits: larger values make fewer calls with more padding.
SLACK = 0.25
"""Share of a block's query-key pairs that may be padding before a shorter stretch begins a block of its own ..."""
SMALL = 1 << 14
"""... unless the padding is fewer pairs than this, which costs less than another call."""
PREFIX = "rlvr_"
EXACT = ("eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations of transformers that compute a layer's cap; sdpa leaves it out."""
# Arguments of transformers' attention functions that change nothing here: the mask is the spans', the window is asked
# of the mask, and the rest is for other implementations' packed rows.
WITHOUT_EFFECT = (
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "sliding_window",
    "use_cache",
)


# Which tokens see which -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """S runs of tokens of one row, in the order they lie there: the row is nothing but them."""

    length: np.ndarray
    """int64 [S], none is 0"""
    context: np.ndarray
    """int64 [S]: the number of the run that each continues, which comes before it; -1: none"""
    device: torch.device
    _segments: dict[int | None, list[Segments]] = field(default_factory=dict)

    @cached_property
    def start(self) -> np.ndarray:
        """int64 [S]: the place of each run's first token."""
        return np.cumsum(self.length) - self.length

    @cached_property
    def context_length(self) -> np.ndarray:
        """int64 [S]: tokens that a run's first token sees before its own run."""
        before = np.zeros_like(self.length)
        for s, context in enumerate(self.context):
            if context >= 0:
                before[s] = before[context] + self.length[context]
        return before

    @cached_property
    def positions(self) -> np.ndarray:
        """int64 [N]: the position of each token, counted from the beginning of the first run that its own continues."""
        return np.arange(self.length.sum()) + np.repeat(self.context_length - self.start, self.length)

    def chain(self, run: int) -> list[int]:
        """The runs that `run` continues, the nearest first."""
        chain: list[int] = []
        above = int(self.context[run])
        while above >= 0:
            chain.append(above)
            above = int(self.context[above])
        return chain

    def segments(self, window: int | None) -> list[Segments]:
        """The calls of a layer in which a token sees at most the `window` tokens up to itself; None: all."""
        longest = int((self.context_length + self.length).max())
        # A window that covers every key is none, so that layers with and without one share their indices.
        if window is not None and window >= longest:
            window = None
        if window not in self._segments:
            self._segments[window] = self._merged() if window is None else [self._windowed(window)]
        return self._segments[window]

    def _merged(self) -> list[Segments]:
        """The runs themselves, then each level of contexts."""
        calls = [_call(None, None, self.length, self.length, self.device)]
        level = self.context
        while (level >= 0).any():
            below = np.flatnonzero(level >= 0)
            # All runs below one context are one stretch of queries.
            below = below[np.argsort(level[below], kind="stable")]
            contexts, first = np.unique(level[below], return_index=True)
            calls.append(
                _call(
                    self._places(below),
                    self._places(contexts),
                    np.add.reduceat(self.length[below], first),
                    self.length[contexts],
                    self.device,
                    causal=False,
                )
            )
            level = np.where(level >= 0, self.context[level], -1)
        return calls

    def _windowed(self, window: int) -> Segments:
        """Each run with the last window - 1 tokens before it and its own."""
        keys: list[np.ndarray] = []
        lengths: list[int] = []
        for run in range(len(self.length)):
            parts = [np.arange(self.start[run], self.start[run] + self.length[run])]
            missing = window - 1
            for above in self.chain(run):
                taken = min(missing, int(self.length[above]))
                end = self.start[above] + self.length[above]
                parts.append(np.arange(end - taken, end))
                missing -= taken
            keys.extend(reversed(parts))
            lengths.append(sum(len(part) for part in parts))
        alone = (self.context < 0).all()
        places = None if alone else np.concatenate(keys)
        return _call(None, places, self.length, np.asarray(lengths, dtype=np.int64), self.device, window=window)

    def _places(self, runs: np.ndarray) -> np.ndarray:
        """int64: the places of all tokens of `runs`, run after run."""
        return np.concatenate([np.arange(self.start[s], self.start[s] + self.length[s]) for s in runs])


def _call(
    queries: np.ndarray | None,
    keys: np.ndarray | None,
    query_length: np.ndarray,
    key_length: np.ndarray,
    device: torch.device,
    causal: bool = True,
    window: int | None = None,
) -> Segments:
    """A call, and which of its stretches may be computed side by side."""
    # Padding on the right is seen by padding alone where a causal call has as many keys before each stretch's queries;
    # else the stretches of a block must have equally many keys.
    alike = key_length - query_length if causal else key_length
    members = blocks_of(query_length, alike, key_length)
    return Segments(queries, keys, query_length, key_length, causal, window, members, device)


def blocks_of(length: np.ndarray, alike: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Stretches that are attended to side by side: in each block `alike` is one number, and little is padding."""
    blocks: list[list[int]] = []
    longest = widest = real = 0
    # Longest first among those that may share a block, so that neighbours are alike and little is padded.
    for s in np.lexsort((-length, alike)):
        own = int(length[s])
        pairs = own * int(keys[s])
        if blocks and alike[blocks[-1][0]] == alike[s]:
            padded = (len(blocks[-1]) + 1) * longest * widest
            if padded - real - pairs <= max(SMALL, SLACK * padded):
                blocks[-1].append(int(s))
                real += pairs
                continue
        blocks.append([int(s)])
        longest = own
        widest = int(keys[s])
        real = pairs
    return [np.asarray(block) for block in blocks]


# What rollouts share --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """Tokens that rollouts of a group have in common at their beginning, as trees: what all members share, what some
    of them share after it, and so on."""

    cluster: np.ndarray
    """int64 [R]: the group of each rollout, numbered from 0"""
    trunks: list[list[tuple[int, int]]]
    """For each rollout the shared runs that it begins with: the run's number and the token past its end, outermost
    first"""

    @classmethod
    def nothing(cls, count: int) -> Shared:
        """Of rollouts that are laid out each for itself."""
        return cls(np.arange(count), [[] for _ in range(count)])

    @cached_property
    def prefix(self) -> np.ndarray:
        """int64 [R]: tokens that all of a rollout's group begin with; 0 where it is alone."""
        return np.asarray([trunks[0][1] if trunks else 0 for trunks in self.trunks], dtype=np.int64)

    @cached_property
    def branch(self) -> np.ndarray:
        """int64 [R]: the innermost shared run of each rollout, -1 without any: what keeps neighbours together."""
        return np.asarray([trunks[-1][0] if trunks else -1 for trunks in self.trunks], dtype=np.int64)

    def select(self, part: np.ndarray) -> Shared:
        """Of some of the rollouts."""
        return Shared(self.cluster[part], [self.trunks[i] for i in part])


def shared_prefixes(batch: Batch, index: np.ndarray, worth: float = math.inf) -> Shared:
    """The tokens that the rollouts at `index` share with their group, found from their token ids.

    A beginning that all of a group have is shared whatever its length; one that only some of them share further on is
    shared where that saves at least `worth` tokens, since each level of sharing is another attention call.
    """
    numbers: dict[str, int] = {}
    cluster = np.asarray([numbers.setdefault(batch.rollouts[i].group, len(numbers)) for i in index], dtype=np.int64)
    trunks: list[list[tuple[int, int]]] = [[] for _ in index]
    count = 0
    for number in range(len(numbers)):
        # (members, tokens that they are known to share, the end of the last run that is shared)
        open_sets = [(np.flatnonzero(cluster == number), 0, 0)]
        while open_sets:
            members, known, end = open_sets.pop()
            if len(members) < 2:
                continue
            ids = [batch.rollouts[index[m]].token_ids for m in members]
            common = known + _common([one[known:] for one in ids])
            saved = (len(members) - 1) * (common - end)
            if common > end and (end == 0 or saved >= worth):
                for m in members:
                    trunks[m].append((count, common))
                count += 1
                end = common
            open_sets.extend((part, common, end) for part in _branches(members, ids, common))
    return Shared(cluster, trunks)


def _branches(members: np.ndarray, ids: Sequence[np.ndarray], common: int) -> list[np.ndarray]:
    """The members that go on with the same token after the first `common`; those that end there are in none."""
    longer = np.asarray([len(one) > common for one in ids])
    tokens = np.asarray([one[common] for one in ids if len(one) > common], dtype=np.int64)
    return [members[longer][tokens == token] for token in np.unique(tokens)]


def _common(ids: Sequence[np.ndarray]) -> int:
    """The length of the longest prefix that all have."""
    shortest = min(len(one) for one in ids)
    # bool [shortest]: places at which all have the token of the first.
    same = np.all([one[:shortest] == ids[0][:shortest] for one in ids[1:]], axis=0)
    if same.all():
        return shortest
    return int(np.argmin(same))


@dataclass(frozen=True)
class Runs:
    """The division of R rollouts of a micro-batch into S runs of one row."""

    spans: Spans
    segments: list[tuple[int, int, int]]
    """(rollout, first token, past the last token) of each run"""
    places: list[np.ndarray]
    """int64 for each rollout: the place of each of its tokens in the row"""


def runs_of(lengths: np.ndarray, shared: Shared, device: torch.device) -> Runs:
    """Runs of rollouts in the order given. What is shared with a rollout outside of these is no run of its own."""
    sharers = Counter(number for trunks in shared.trunks for number, _ in trunks)
    segments: list[tuple[int, int, int]] = []
    context: list[int] = []
    places: list[np.ndarray] = []
    # The run of each shared trunk, and where it starts.
    laid: dict[int, tuple[int, int]] = {}
    end_of_row = 0
    for r, trunks in enumerate(shared.trunks):
        parts: list[np.ndarray] = []
        above = -1
        begin = 0
        for number, end in trunks:
            if sharers[number] < 2:
                continue
            if number not in laid:
                laid[number] = (len(segments), end_of_row)
                segments.append((r, begin, end))
                context.append(above)
                end_of_row += end - begin
            above, start = laid[number]
            parts.append(np.arange(start, start + end - begin))
            begin = end
        # A rollout may be nothing but what it shares (an empty response) and then has no run of its own.
        if lengths[r] > begin:
            segments.append((r, begin, int(lengths[r])))
            context.append(above)
            parts.append(np.arange(end_of_row, end_of_row + int(lengths[r]) - begin))
            end_of_row += int(lengths[r]) - begin
        places.append(np.concatenate(parts))
    length = np.asarray([end - first for _, first, end in segments], dtype=np.int64)
    return Runs(Spans(length, np.asarray(context, dtype=np.int64), device), segments, places)


# Stock models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RowMask:
    """The mask of a layer while spans are in place."""

    spans: Spans
    window: int | None


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
    """Let `model` attend by spans; without spans it computes as before."""
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
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, Any]:
    """The attention function of a hooked model; shapes [1, heads, N, D] -> [1, N, heads, E] under spans."""
    if not isinstance(attention_mask, _RowMask):
        if base == "sdpa" and attention_mask is None:
            key, value = _for_sdpa(query, key, value)
        given = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        # Those that the layer did not pass stay away: not every attention function takes them.
        given = {name: argument for name, argument in given.items() if argument is not None}
        return _function(base, module)(module, query, key, value, attention_mask, **given, **more)
    unknown = [name for name, argument in more.items() if argument is not None and name not in WITHOUT_EFFECT]
    if unknown or dropout:
        raise NotImplementedError(f"packed rows have no attention with {', '.join(unknown) or 'dropout'}")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scoring = ScoreRule(scaling, softcap if base in EXACT else None)
    segments = attention_mask.spans.segments(attention_mask.window)
    # [1, heads, N, D] -> [N, heads, D], as the layer had them before it put the heads in front.
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    sinks = s_aux if base in EXACT else None
    return attend(query, key, value, segments, scoring, sinks)[None], None


def _for_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [R, heads, L, D] that torch's sdpa computes without all scores as one tensor.

    On a GPU in float32 there is its memory-efficient kernel alone, which takes no grouped queries: with them torch
    takes its math kernel (aten/native/transformers/cuda/sdp_utils.cpp, `check_batch_size_and_num_heads_dense`). Where
    there is a mask transformers repeats keys and values itself.
    """
    groups = query.shape[1] // key.shape[1]
    # transformers' condition for grouped queries (integrations/sdpa_attention.py, `use_gqa_in_sdpa`); else it repeats.
    grouped = groups > 1 and key.shape[-1] == value.shape[-1] <= WIDEST
    half = query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type)
    if not grouped or half or not _on_gpu(query):
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _function(base: str, module: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The attention function that the model was loaded with."""
    if base == "eager":
        # Each model file has its own eager function, which transformers does not register.
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[base]
