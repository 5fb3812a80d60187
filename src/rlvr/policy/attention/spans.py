"""Which tokens of a packed row attend to which.

A row is cut into runs of tokens. A run may continue another run, its context, which may continue a third, and so on:
the runs of a row are trees, and what several runs continue is laid down and computed once. A token sees its own run up
to itself, and all tokens of the runs that its own continues.

For a layer with full attention, `Spans.segments` gives one call for the runs themselves, causal, and one for each level
of contexts: all queries below a run against the keys of that run, all of which they see. The outputs of these calls are
merged by their log-sum-exp (`rlvr.policy.attention.merged`). For a layer with a sliding window it gives one call, in
which each run has the keys of the window in front of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from rlvr.core.device_memory import to_device

# Both are rough balances of padding against calls, not fits: larger values make fewer calls with more padding.
SLACK = 0.25
"""Share of a block's query-key pairs that may be padding before a shorter stretch begins a block of its own ..."""
SMALL = 1 << 14
"""... unless the padding is fewer pairs than this, which costs less than another call."""


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
    device: torch.device

    @cached_property
    def varlen(self) -> Varlen:
        """The indices of a kernel that takes stretches of any length."""
        arrays = [
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            for lengths in (self.query_length, self.key_length)
        ]
        rounds = [] if self.keys is None else unique_rounds(self.keys)
        given = [places for places in (self.queries, self.keys) if places is not None]
        put = to_device([*arrays, *given, *rounds], self.device)
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
            rest,
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

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The stretches of each block."""
        # Padding on the right is seen by padding alone where a causal call has as many keys before each stretch's
        # queries; else the stretches of a block must have equally many keys.
        alike = self.key_length - self.query_length if self.causal else self.key_length
        return blocks_of(self.query_length, alike, self.key_length)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        if not self.causal:
            return int((self.query_length * self.key_length).sum())
        before = self.key_length - self.query_length
        # Query i of a stretch, counted from 0, sees before + i + 1 keys without a window.
        every = self.query_length * before + self.query_length * (self.query_length + 1) // 2
        if self.window is None:
            return int(every.sum())
        # Of these, what lies further away than the window: the queries with more than `window` keys.
        beyond = np.maximum(self.key_length - self.window, 0)
        first = np.maximum(before + 1 - self.window, 0)
        # Sum over queries of max(before + i + 1 - window, 0): from the larger of `first` and 1 up to `beyond`.
        hidden = beyond * (beyond + 1) // 2 - np.maximum(first - 1, 0) * np.maximum(first, 0) // 2
        return int((every - hidden).sum())

    @property
    def padded_pairs(self) -> int:
        """Pairs that `blocks` have, the padding and what is not visible included."""
        return sum(len(m) * int(self.query_length[m].max()) * int(self.key_length[m].max()) for m in self.members)


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
    rounds: list[torch.Tensor]
    """int64 each: which of the K keys are added to the row's gradient together; no place of the row occurs twice in a
    round, so that the sums have one order"""


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
        calls = [Segments(None, None, self.length, self.length, True, None, self.device)]
        level = self.context
        while (level >= 0).any():
            below = np.flatnonzero(level >= 0)
            # All runs below one context are one stretch of queries.
            below = below[np.argsort(level[below], kind="stable")]
            contexts, first = np.unique(level[below], return_index=True)
            calls.append(
                Segments(
                    self._places(below),
                    self._places(contexts),
                    np.add.reduceat(self.length[below], first),
                    self.length[contexts],
                    False,
                    None,
                    self.device,
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
        return Segments(None, places, self.length, np.asarray(lengths, dtype=np.int64), True, window, self.device)

    def _places(self, runs: np.ndarray) -> np.ndarray:
        """int64: the places of all tokens of `runs`, run after run."""
        return np.concatenate([np.arange(self.start[s], self.start[s] + self.length[s]) for s in runs])


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


def unique_rounds(places: np.ndarray) -> list[np.ndarray]:
    """Positions in `places`, divided so that no place occurs twice in a part: the first occurrences, the second, ..."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    first = np.flatnonzero(new)
    # int64: how many occurrences of the same place come before each.
    turn = np.empty_like(places)
    turn[order] = np.arange(len(places)) - np.repeat(first, np.diff(np.append(first, len(places))))
    return [np.flatnonzero(turn == t) for t in range(int(turn.max()) + 1)]


def _padded(start: np.ndarray, length: np.ndarray, longest: int) -> np.ndarray:
    """int64 [R, longest]: the places of each stretch's tokens, then that of some token as padding."""
    steps = np.arange(longest)
    # Place 0 is a real token: as a key it is seen by padding alone, and what a padded query gives is taken by nobody.
    return np.where(steps < length[:, None], start[:, None] + steps, 0)
