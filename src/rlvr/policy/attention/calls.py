"""Calls of attention as kernels take them: stretches of queries and of keys, and their indices on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from rlvr.core.device_memory import to_device

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values."""


@dataclass(frozen=True)
class ScoreRule:
    """The rule by which scores come from the products of queries and keys."""

    scale: float
    """Factor of the products."""
    softcap: float | None = None
    """scores = softcap x tanh(scale x products / softcap); None: scale x products"""


@dataclass(frozen=True)
class Segments:
    """One attention call: n stretches of queries, each with a stretch of keys of its own."""

    queries: np.ndarray | None
    """int64 [Q]: the places of the queries in the row, stretch after stretch, none twice; None: all of the row in
    order"""
    keys: np.ndarray | None
    """int64 [K]: the places of the keys, stretch after stretch; None: all of the row in order"""
    query_length: np.ndarray
    """int64 [n]: queries of each stretch, at least 1"""
    key_length: np.ndarray
    """int64 [n]: keys of each stretch, at least 1; in a causal call at least as many as its queries"""
    causal: bool
    """True: the last query of a stretch sees its last key, and each query before it one key less. False: every query
    sees all keys of its stretch."""
    window: int | None
    """Largest number of keys that a query of a causal call sees; None: no limit"""
    members: list[np.ndarray]
    """int64 each: the stretches that are computed side by side by a kernel without variable lengths"""
    device: torch.device

    @cached_property
    def varlen(self) -> Varlen:
        """The indices of a kernel that takes stretches of any length."""
        arrays = [
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            for lengths in (self.query_length, self.key_length)
        ]
        repeats = None if self.keys is None else repeats_of(self.keys)
        given = [places for places in (self.queries, self.keys) if places is not None]
        put = to_device([*arrays, *given, *(repeats or ())], self.device)
        query_offsets, key_offsets, *rest = put
        queries = rest.pop(0) if self.queries is not None else None
        keys = rest.pop(0) if self.keys is not None else None
        return Varlen(
            queries,
            keys,
            query_offsets,
            key_offsets,
            int(self.query_length.max()),
            int(self.key_length.max()),
            Repeats(*rest) if rest else None,
        )

    @cached_property
    def blocks(self) -> Blocks:
        """The indices of a kernel that takes stretches side by side, padded to one length."""
        first_query = np.cumsum(self.query_length) - self.query_length
        first_key = np.cumsum(self.key_length) - self.key_length
        arrays: list[np.ndarray] = []
        sizes: list[tuple[int, int, int]] = []
        where = np.empty(int(self.query_length.sum()), dtype=np.int64)
        offset = 0
        for members in self.members:
            own = self.query_length[members]
            longest = int(own.max())
            most_keys = int(self.key_length[members].max())
            sizes.append((len(members), longest, most_keys))
            # [R, longest], [R, most_keys] and bool [R, longest].
            arrays.append(_padded(first_query[members], own, longest).ravel())
            arrays.append(_padded(first_key[members], self.key_length[members], most_keys).ravel())
            real = np.arange(longest) < own[:, None]
            arrays.append(real)
            slots = np.arange(real.size).reshape(real.shape)
            # int64: the queries of the members, row by row as `real` counts them; offset counts the slots before.
            queries = _padded(first_query[members], own, longest)[real]
            where[queries] = offset + slots[real]
            offset += real.size
        # All arrays by one copy.
        put = iter(to_device([where, *arrays], self.device))
        places = next(put)
        blocks = [Block(*size, next(put), next(put), next(put)) for size in sizes]
        return Blocks(blocks, places)


@dataclass(frozen=True)
class Varlen:
    """Indices of a call for a kernel of variable lengths, on the device."""

    queries: torch.Tensor | None
    """int64 [Q], None: all of the row"""
    keys: torch.Tensor | None
    """int64 [K], None: all of the row"""
    query_offsets: torch.Tensor
    """int32 [n + 1]: where each stretch of queries begins, and the end of the last"""
    key_offsets: torch.Tensor
    """int32 [n + 1]"""
    most_queries: int
    most_keys: int
    repeats: Repeats | None
    """The places that occur among the keys several times, as those of a shared prefix do in each window that begins
    in it; None: none does"""


@dataclass(frozen=True)
class Repeats:
    """The places among a call's K keys, each once, so that what belongs to one place is added up in one order."""

    order: torch.Tensor
    """int64 [K]: the keys ordered by place"""
    places: torch.Tensor
    """int64 [U]: the places that occur, ascending"""
    counts: torch.Tensor
    """int64 [U]: how often each does"""


@dataclass(frozen=True)
class Block:
    """R stretches side by side, padded on the right to `queries` and `keys` slots."""

    rows: int
    queries: int
    keys: int
    take_queries: torch.Tensor
    """int64 [R * queries], among the call's queries"""
    take_keys: torch.Tensor
    """int64 [R * keys], among the call's keys"""
    real: torch.Tensor
    """bool [R, queries]: False for padding"""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a call."""

    blocks: list[Block]
    places: torch.Tensor
    """int64 [Q]: where each query's output is in the blocks' slots laid end to end"""


def repeats_of(places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(positions in `places` ordered by place, the places that occur, how often each does); None: none occurs twice."""
    occurring, counts = np.unique(places, return_counts=True)
    if len(occurring) == len(places):
        return None
    return np.argsort(places, kind="stable"), occurring, counts


def _padded(start: np.ndarray, length: np.ndarray, longest: int) -> np.ndarray:
    """int64 [R, longest]: the places of each stretch's tokens, then that of some token as padding."""
    steps = np.arange(longest)
    # Place 0 is a real token: as a key it is seen by padding alone, and what a padded query gives is taken by nobody.
    return np.where(steps < length[:, None], start[:, None] + steps, 0)
