"""A key-value cache whose rows come and go: preallocated, joined by left padding, compacted.

Rows are aligned on the right: every row's newest token is in the last used slot, and a shorter row has unused slots on
the left, which the attention mask hides. Only for attention layers (full or sliding window).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rlvr.errors import ConfigError

GROWTH = 64
"""Slots that are added at once when a layer is full."""


class GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer in storage [R, heads, capacity, D], of which the first `length` slots are used."""

    is_sliding = False
    is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for the first tokens."""
        shape = (*key_states.shape[:2], key_states.shape[2] + GROWTH)
        self.keys = key_states.new_empty(*shape, key_states.shape[3])
        self.values = value_states.new_empty(*shape, value_states.shape[3])
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens [R, heads, q, D]; the used part of keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._reserve(key_states.shape[2])
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` for one token a row, [R, heads, D]."""
        if not self.is_initialized:
            return self.update(keys[:, :, None], values[:, :, None])
        start, end = self._reserve(1)
        self.keys.select(2, start).copy_(keys)
        self.values.select(2, start).copy_(values)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def _reserve(self, tokens: int) -> tuple[int, int]:
        """The slots of new tokens, first and one past the last, which now count as used."""
        start, end = self.length, self.length + tokens
        if end > self.keys.shape[2]:
            self._resize(rows=self.keys.shape[0], left=0, capacity=end + GROWTH)
        self.length = end
        return start, end

    def _resize(self, rows: int, left: int, capacity: int) -> None:
        """New storage of `rows` rows with the old ones first, moved `left` slots to the right."""
        old = self.keys.shape[0]
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            grown = tensor.new_zeros(rows, tensor.shape[1], capacity, tensor.shape[3])
            grown[:old, :, left : left + self.length] = tensor[:, :, : self.length]
            setattr(self, name, grown)
        self.length += left

    def take(self, other: GrowingLayer) -> None:
        """Add the rows of another layer; the shorter of the two is padded on the left."""
        rows, length = self.keys.shape[0], max(self.length, other.length)
        self._resize(rows + other.keys.shape[0], length - self.length, length + GROWTH)
        left = length - other.length
        self.keys[rows:, :, left:length] = other.keys[:, :, : other.length]
        self.values[rows:, :, left:length] = other.values[:, :, : other.length]

    def select(self, rows: torch.Tensor) -> None:
        """Keep `rows`, in this order (repeats allowed)."""
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def drop(self, to: torch.Tensor, source: torch.Tensor, rows: int, trim: int) -> None:
        """Keep `rows` rows, after those at `source` were moved to the places `to`, without the first `trim` slots."""
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            tensor[to, :, : self.length] = tensor[source, :, : self.length]
            setattr(self, name, tensor[:rows, :, trim:])
        self.length -= trim

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
    """The cache of all layers of a model."""

    layers: list[GrowingLayer]  # type: ignore[assignment]

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[GrowingLayer() for _ in range(layers)])

    def take(self, other: RowCache) -> None:
        """Add the rows of `other`."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.take(theirs)

    def select(self, rows: torch.Tensor) -> None:
        """Keep `rows`, in this order (repeats allowed)."""
        for layer in self.layers:
            layer.select(rows)

    def drop(self, to: torch.Tensor, source: torch.Tensor, rows: int, trim: int) -> None:
        """Keep `rows` rows, after those at `source` were moved to the places `to`, without the first `trim` slots."""
        for layer in self.layers:
            layer.drop(to, source, rows, trim)

    @property
    def length(self) -> int:
        """Used slots."""
        return self.layers[0].length


def check_cacheable(config: Any) -> None:
    """ConfigError for a model with layers that keep something other than keys and values (linear attention, say)."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise ConfigError(
            f"rollout.engine hf decodes attention layers only, and this model has {', '.join(sorted(others))}: "
            "use an engine that serves it"
        )
