"""Keys and values, and the reading of prompts, for models that are decoded by their own modules.

Rows are aligned on the right, as the masks of transformers take it: the newest token of each is in the last used slot,
and a shorter row has unused slots on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rlvr.policy import Policy
from rlvr.rollout.rows import GROWTH, CachePlan


# transformers' DynamicLayer (cache_utils.py) joins old and new keys with torch.cat, which copies the whole cache for
# every token.
class GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer in storage [R, heads, capacity, D], of which the first `length` slots are used."""

    # Attributes that the masking code of transformers reads. A sliding window is applied by the mask, so all keys are
    # kept here also for layers that have one.
    is_sliding = False
    is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate storage for the first tokens."""
        # key_states: [R, heads, q, D]. No more than they need: `spread` allocates for the rows.
        self.keys = torch.empty_like(key_states, memory_format=torch.contiguous_format)
        self.values = torch.empty_like(value_states, memory_format=torch.contiguous_format)
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens [R, heads, q, D]; the used part of keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.length
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self._resize(rows=self.keys.shape[0], left=0, capacity=end + GROWTH)
        self.length = end
        # Returned are views of the storage, not copies: attention reads the used slots where they lie.
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _resize(self, rows: int, left: int, capacity: int) -> None:
        """New storage of `rows` rows with the old ones first, moved `left` slots to the right."""
        old = self.keys.shape[0]
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            # Zeros, not empty memory: slots on the left of a row are masked, but masked scores are still multiplied
            # with their values, and NaN x 0 is NaN.
            grown = tensor.new_zeros(rows, tensor.shape[1], capacity, tensor.shape[3])
            grown[:old, :, left : left + self.length] = tensor[:, :, : self.length]
            setattr(self, name, grown)
        self.length += left

    def take(self, other: GrowingLayer) -> None:
        """Add the rows of another layer; the shorter of the two is padded on the left."""
        rows = self.keys.shape[0]
        length = max(self.length, other.length)
        capacity = max(self.keys.shape[2], other.keys.shape[2], length)
        self._resize(rows + other.keys.shape[0], length - self.length, capacity)
        left = length - other.length
        self.keys[rows:, :, left:length] = other.keys[:, :, : other.length]
        self.values[rows:, :, left:length] = other.values[:, :, : other.length]

    def spread(self, rows: torch.Tensor, capacity: int) -> None:
        """Keep `rows`, in this order (repeats allowed), in storage of `capacity` slots."""
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            wide = tensor.new_empty(len(rows), tensor.shape[1], capacity, tensor.shape[3])
            wide[:, :, : self.length] = tensor[:, :, : self.length].index_select(0, rows)
            setattr(self, name, wide)

    # Rows are moved one for one and not gathered by index_select: only the few that fill a gap are copied, and the
    # storage keeps its capacity.
    def drop(self, to: torch.Tensor, source: torch.Tensor, rows: int, trim: int) -> None:
        """Keep `rows` rows, after those at `source` were moved to the places `to`, without the first `trim` slots."""
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            tensor[to, :, : self.length] = tensor[source, :, : self.length]
            # A view: the memory of dropped rows is given back at the next `_resize`.
            setattr(self, name, tensor[:rows, :, trim:])
        self.length -= trim

    # The methods below are those of transformers' CacheLayerMixin ; `get_max_cache_shape` is its deprecated name for
    # `get_max_length` (5.19). -1 means "no bound" there.
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Used slots."""
        return self.length

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No bound."""
        return -1


class RowCache(Cache):
    """The cache of all layers of a model, of rows aligned on the right."""

    layers: list[GrowingLayer]  # type: ignore[assignment]
    slots = 1 << 62
    """No bound: the storage grows where the plan is exceeded."""

    def __init__(self, layers: int, unused: np.ndarray | None = None) -> None:
        """`unused` int64 [R]: slots on the left that a row has no token in."""
        super().__init__(layers=[GrowingLayer() for _ in range(layers)])
        self.unused = np.zeros(0, dtype=np.int64) if unused is None else unused
        self._seen = torch.zeros(0, 0)
        """bool [R, slots or more] of `seen`."""

    @property
    def length(self) -> int:
        """Used slots."""
        return self.layers[0].length

    def seen(self, slots: int, device: torch.device) -> torch.Tensor:
        """bool [R, slots], true where a row has a token."""
        if self._seen.shape[0] != len(self.unused) or self._seen.shape[1] < slots:
            unused = torch.from_numpy(self.unused).to(device)
            # Twice the need, so that it is made a logarithmic number of times in the life of a batch.
            self._seen = torch.arange(2 * slots, device=device) >= unused[:, None]
        return self._seen[:, :slots]

    def spread(self, source: np.ndarray, rows: torch.Tensor, slots: int) -> None:
        """Keep the rows of `source`, which is `rows` on the host, in storage of `slots` slots."""
        self.unused = self.unused[source]
        for layer in self.layers:
            layer.spread(rows, slots)
        self._changed()

    def join(self, other: RowCache) -> None:
        """Add the rows of `other`: the shorter of the two is moved to the right."""
        # Both are aligned on the right, so the shorter cache gets |ahead| unused slots on its left.
        ahead = self.length - other.length
        self.unused = np.concatenate([self.unused + max(0, -ahead), other.unused + max(0, ahead)])
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.take(theirs)
        self._changed()

    def drop(self, to: np.ndarray, source: np.ndarray, rows: int) -> None:
        """Keep `rows` rows, after those at `source` were moved to the places `to`."""
        self.unused[to] = self.unused[source]
        self.unused = self.unused[:rows]
        trim = int(self.unused.min())  # slots on the left that no row uses any more
        self.unused = self.unused - trim
        device = self.layers[0].keys.device
        places = torch.from_numpy(to).to(device)
        others = torch.from_numpy(source).to(device)
        for layer in self.layers:
            layer.drop(places, others, rows, trim)
        self._changed()

    def _changed(self) -> None:
        self._seen = torch.zeros(0, 0)


def read_by_modules(
    policy: Policy, prompts: Sequence[Sequence[int]], source: np.ndarray, plan: CachePlan
) -> tuple[torch.Tensor, RowCache]:
    """Float32 logits [P, V] after P prompts, and a cache in which row r is prompt `source[r]`."""
    device = policy.device
    host_ids, unused = padded(prompts)
    # [P, L]: 0 at a prompt's first token, negative where the row has none (clipped to 0 for the rotary table, hidden by
    # `seen`)
    positions = torch.from_numpy((np.arange(host_ids.shape[1]) - unused[:, None]).clip(0)).to(device)
    cache = RowCache(int(policy.causal_lm.config.get_text_config().num_hidden_layers), unused)
    ids = torch.from_numpy(host_ids).to(device)
    logits = policy.next_logits(ids, cache.seen(ids.shape[1], device), positions, cache)
    cache.spread(source, torch.from_numpy(source).to(device), max(plan.slots, ids.shape[1]))
    return logits, cache


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows aligned on the right: ids int64 [P, L], and how many slots each leaves unused on the left,
    [P]."""
    length = max(map(len, prompts))
    unused = np.asarray([length - len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), length), dtype=np.int64)
    for i, prompt in enumerate(prompts):
        ids[i, unused[i] :] = prompt
    return ids, unused
