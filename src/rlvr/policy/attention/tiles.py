"""Attention in tiles of plain torch: for devices, precisions, caps and windows that no kernel of torch's computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rlvr.policy.attention.calls import Gradients, ScoreRule, Segments
from rlvr.policy.head_devices import sums_wide

QUERIES = 512
"""Queries of a causal tile: large enough for matrix products, and at a length of 16384 the tiles on the diagonal have
3 % more pairs than are visible."""
CPU_KEYS = 512
"""Most keys of a tile on a CPU: 1 MiB of scores for each head in float32."""
CPU_SCORES = 1 << 23
"""Most scores of a tile on a CPU, of all heads and of the stretches that are computed together: 32 MiB in float32."""
GPU_SCORES = 1 << 26
"""And on a GPU: 256 MiB, which an H100 reads in 80 us, twenty times what a launch takes."""
# In the backward pass there are, for each score, the probability, its gradient and the tanh of a cap in float32, and
# the first two in the inputs' type.
LIVE = 16
"""Bytes for each score of a tile that there are at once, at most."""
SHARE = 64
"""They take at most this part of a GPU's memory, one in so many; else its tiles have fewer keys."""


@dataclass(frozen=True)
class _Tile:
    """The keys of a tile, and which of its pairs are not visible."""

    keys: slice
    hidden: list[tuple[slice, torch.Tensor]]
    """Columns of the tile, and bool [queries, columns] of them: the pairs at its edges that are not visible"""


@dataclass(frozen=True)
class _Strip:
    """The tiles of the same queries of a block."""

    queries: slice
    tiles: list[_Tile]


@dataclass(frozen=True)
class Tiles:
    """Attention of blocks, tile by tile. No tile grows with the row of tokens."""

    scores: int
    """Most scores of a tile, of all heads and of the stretches that are computed together; more where a tile of one
    stretch with `queries` queries and as many keys has more."""
    most_keys: int | None = None
    """Most keys of a tile; None: as many as `scores` allows"""
    wide_sums: bool = False
    """True: matrix products of 16-bit numbers are summed up in float32 by the device, and probabilities and their
    gradients are rounded to 16 bits before them, as flash attention does. False: products are in float32."""
    queries: int = QUERIES
    """Queries of a causal tile, and the fewest keys that one may be narrowed to"""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, H, L, D], [R, G, K, D], [R, G, K, E] -> [R, H, L, E], [R, H, L]."""
        output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:-1], dtype=_summed_in(query.dtype), device=query.device)
        for part in self._parts(query, key, segments.causal):
            self._forward_part(query[part], key[part], value[part], output[part], lse[part], segments, scoring)
        return output, lse

    def _forward_part(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> None:
        """Some rows of `forward`, into `output` and `lse`.

        The running maximum and sum of each query are those of flash attention (Dao et al. 2022, algorithm 1).
        """
        kind = lse.dtype
        groups = key.shape[1]
        q = self._operand(query.unflatten(1, (groups, -1)).flatten(0, 1))
        k, v = (self._operand(x.flatten(0, 1)) for x in (key, value))
        # Views of what is written, [R * G, H / G, L, E] and [R * G, H / G, L].
        outputs, sums = (x.view(*q.shape[:3], *x.shape[3:]) for x in (output, lse))
        for strip in self._strips(query, key, segments):
            rows = q[:, :, strip.queries].flatten(1, 2)
            # Finite, so that a tile without a visible key for some query adds exp(-inf) = 0 and not NaN.
            largest = torch.full(rows.shape[:2], torch.finfo(kind).min, dtype=kind, device=q.device)
            total = torch.zeros_like(largest)
            weighted = torch.zeros((*rows.shape[:2], v.shape[-1]), dtype=kind, device=q.device)
            for tile in strip.tiles:
                largest = self._add_tile((largest, total, weighted), rows, k, v, tile, scoring)
            # [R * G, H / G * queries, ...] -> [R * G, H / G, queries, ...]
            outputs[:, :, strip.queries] = (weighted / total[..., None]).unflatten(1, (q.shape[1], -1))
            sums[:, :, strip.queries] = (largest + torch.log(total)).unflatten(1, (q.shape[1], -1))

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        """Its backward pass."""
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for part in self._parts(query, key, segments.causal):
            of_part = self._backward_part(
                gradient[part], query[part], key[part], value[part], output[part], lse[part], segments, scoring
            )
            for whole, own in zip(gradients, of_part, strict=True):
                whole[part] = own.view(whole[part].shape)
        return gradients

    def _backward_part(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        """Some rows of `backward`, in which the probabilities are computed again (Dao et al. 2022, algorithm 4)."""
        kind = _summed_in(query.dtype)
        groups = key.shape[1]
        # [R * G, H / G, L, ...] of queries, [R * G, K, ...] of keys.
        q, given, out, sums = (x.unflatten(1, (groups, -1)).flatten(0, 1) for x in (query, gradient, output, lse))
        mean = (given.to(kind) * out.to(kind)).sum(-1)
        q, given, k, v = (self._operand(x) for x in (q, given, key.flatten(0, 1), value.flatten(0, 1)))
        of_query, of_key, of_value = (torch.zeros(x.shape, dtype=kind, device=x.device) for x in (q, k, v))
        for strip in self._strips(query, key, segments):
            rows, given_rows = (x[:, :, strip.queries].flatten(1, 2) for x in (q, given))
            row_sums, row_mean = (x[:, :, strip.queries].flatten(1, 2)[..., None] for x in (sums.to(kind), mean))
            of_rows = torch.zeros(rows.shape, dtype=kind, device=q.device)
            for tile in strip.tiles:
                totals = of_rows, of_key, of_value
                self._add_gradients(totals, (given_rows, row_sums, row_mean), rows, k, v, tile, scoring)
            of_query[:, :, strip.queries] = of_rows.unflatten(1, (q.shape[1], -1))
        return of_query.mul_(scoring.scale), of_key.mul_(scoring.scale), of_value

    # A tile is a call, so that nothing of it is there beside the next one.

    def _add_tile(
        self,
        sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tile: _Tile,
        scoring: ScoreRule,
    ) -> torch.Tensor:
        """Add a tile to the sums of exponentials [B, N] and to the outputs before division [B, N, E] of queries `rows`
        [B, N, D], which are relative to the largest scores [B, N]; the largest scores after it."""
        largest, total, weighted = sums
        scores = self._scores(rows, key[:, tile.keys], tile, scoring)[0]
        top = torch.maximum(largest, scores.amax(-1))
        shrunk = torch.exp(largest - top)
        exponentials = scores.sub_(top[..., None]).exp_()
        total.mul_(shrunk).add_(exponentials.sum(-1))
        added = _product(exponentials.to(value.dtype), value[:, tile.keys], total.dtype)
        weighted.mul_(shrunk[..., None]).add_(added)
        return top

    def _add_gradients(
        self,
        totals: Gradients,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tile: _Tile,
        scoring: ScoreRule,
    ) -> None:
        """Add a tile's gradients to those of its queries `rows` [B, N, D] and of all keys and values.

        `given`: of each query the gradient of its output [B, N, E], its log-sum-exp and the mean gradient of its
        probabilities, each [B, N, 1].
        """
        of_rows, of_key, of_value = totals
        gradient, sums, mean = given
        kind = of_rows.dtype
        scores, bent = self._scores(rows, key[:, tile.keys], tile, scoring)
        probabilities = scores.sub_(sums).exp_()
        of_value[:, tile.keys] += _product(probabilities.to(rows.dtype).mT, gradient, kind)
        of_scores = _product(gradient, value[:, tile.keys].mT, kind).sub_(mean).mul_(probabilities)
        if bent is not None:
            of_scores = torch.ops.aten.tanh_backward(of_scores, bent)
        of_scores = of_scores.to(rows.dtype)
        of_rows += _product(of_scores, key[:, tile.keys], kind)
        of_key[:, tile.keys] += _product(of_scores.mT, rows, kind)

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, tile: _Tile, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores [B, queries of all heads, keys] of a tile, hidden pairs at -inf, and the tanh of a cap."""
        scores = _product(query, key.mT, _summed_in(query.dtype))
        bent = None
        if scoring.softcap is None:
            scores.mul_(scoring.scale)
        else:
            bent = scores.mul_(scoring.scale / scoring.softcap).tanh_()
            scores = bent * scoring.softcap
        for columns, hidden in tile.hidden:
            scores.unflatten(1, (-1, len(hidden)))[..., columns].masked_fill_(hidden, -torch.inf)
        return scores, bent

    def _operand(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as matrix products take it."""
        return x if self.wide_sums else x.to(_summed_in(x.dtype))

    def most_scores(self, heads: int, rows: int, queries: int, keys: int, causal: bool) -> int:
        """The most scores of a tile where `rows` stretches have so many queries, and keys each."""
        return min(rows, self._together(heads, queries, keys, causal)) * self._of_one(heads, queries, keys, causal)

    def bytes_of_score(self, dtype: torch.dtype, capped: bool, backward: bool) -> int:
        """Bytes for each score of a tile that there are at once, for inputs of this type; `LIVE` at most in float32."""
        number = _summed_in(dtype).itemsize
        # The copy that a matrix product takes.
        copy = dtype.itemsize if self.wide_sums and dtype.itemsize < number else 0
        if not backward:
            # The scores, which become exponentials in place, and the tanh of a cap while they are made of it.
            return max(2 * number if capped else number, number + copy)
        # Probabilities and gradient; with a cap its tanh, and the gradient from before it while the next one is made.
        return 4 * number if capped else 2 * number + copy

    def _sizes(self, heads: int, queries: int, keys: int, causal: bool) -> tuple[int, int]:
        """The most queries and keys of a tile of one stretch."""
        height = min(queries, self.queries)
        width = max(self.scores // (heads * height), self.queries)
        if self.most_keys is not None:
            return height, min(width, self.most_keys)
        # Without a diagonal, no pair of a higher tile is computed for nothing.
        if not causal:
            height = max(height, self.scores // (heads * min(width, keys)))
        return height, width

    def _of_one(self, heads: int, queries: int, keys: int, causal: bool) -> int:
        """The most scores of a tile of one stretch."""
        height, width = self._sizes(heads, queries, keys, causal)
        return heads * min(queries, height) * min(keys, width)

    def _together(self, heads: int, queries: int, keys: int, causal: bool) -> int:
        """The most stretches that are computed together."""
        return max(1, self.scores // self._of_one(heads, queries, keys, causal))

    def _parts(self, query: torch.Tensor, key: torch.Tensor, causal: bool) -> list[slice]:
        """The rows of a block, those that are computed together in one slice."""
        rows, heads, queries, _ = query.shape
        together = self._together(heads, queries, key.shape[2], causal)
        return [slice(first, min(first + together, rows)) for first in range(0, rows, together)]

    def _strips(self, query: torch.Tensor, key: torch.Tensor, segments: Segments) -> list[_Strip]:
        """The tiles of a block that have visible pairs."""
        queries = query.shape[2]
        keys = key.shape[2]
        height, width = self._sizes(query.shape[1], queries, keys, segments.causal)
        before = keys - queries  # position of query 0 among the keys, in a causal call
        edge = _edges(query.device)
        strips = []
        for first in range(0, queries, height):
            end = min(first + height, queries)
            # A causal query at position p sees the keys up to p, from p - window + 1 on.
            highest = before + end if segments.causal else keys
            lowest = 0
            if segments.window is not None:
                lowest = max(before + first - segments.window + 1, 0)
            tiles = []
            for start in range(lowest, highest, width):
                stop = min(start + width, highest)
                # The position of the first query from the tile's first key on.
                hidden = _hidden(end - first, stop - start, before + first - start, segments, edge)
                tiles.append(_Tile(slice(start, stop), hidden))
            strips.append(_Strip(slice(first, end), tiles))
        return strips


def tiles_of(device: torch.device, device_type: str) -> Tiles:
    """The tiles of a device. `device_type`: that whose choices are made, wherever the tensors are."""
    if device_type == "cpu":
        return Tiles(CPU_SCORES, CPU_KEYS)
    wide = device_type == "cuda" and (device.type != "cuda" or sums_wide(device))
    return Tiles(gpu_scores(device), wide_sums=wide)


def tiles_within(gpu_memory: float | None) -> Tiles:
    """The tiles of a GPU of so many bytes and of compute capability 8 or above, or of a CPU (None)."""
    if gpu_memory is None:
        return Tiles(CPU_SCORES, CPU_KEYS)
    return Tiles(_scores_within(gpu_memory), wide_sums=True)


@cache
def gpu_scores(device: torch.device) -> int:
    """The most scores of a tile on a device that is no CPU.

    From the memory that it has, not from what is free: the same run has the same tiles and so the same bits.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return _scores_within(torch.cuda.get_device_properties(device).total_memory)
    return GPU_SCORES


def _scores_within(memory: float) -> int:
    scores = GPU_SCORES
    while LIVE * scores * SHARE > memory:
        scores //= 2
    return scores


@dataclass(frozen=True)
class WatchedTiles(Tiles):
    """Tiles that are computed inside of `watch`. For counts of memory."""

    watch: Callable[[], AbstractContextManager[None]] = nullcontext

    def _add_tile(self, *inputs: Any) -> torch.Tensor:
        with self.watch():
            return super()._add_tile(*inputs)

    def _add_gradients(self, *inputs: Any) -> None:
        with self.watch():
            super()._add_gradients(*inputs)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The type that tiles are added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(left: torch.Tensor, right: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """[B, m, k] x [B, k, n] -> [B, m, n] in `kind`."""
    if left.dtype == kind:
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=kind)


Edge = Callable[[int, int, int, bool], torch.Tensor]


def _edges(device: torch.device) -> Edge:
    """A function of (queries, columns, shift, right): bool [queries, columns], for the right edge True where column >
    query + shift, for the left edge where it is not. Tiles of one geometry have the same tensor."""

    @cache
    def edge(queries: int, columns: int, shift: int, right: bool) -> torch.Tensor:
        column = torch.arange(columns, device=device)
        last = torch.arange(shift, shift + queries, device=device)[:, None]
        return column > last if right else column <= last

    return edge


def _hidden(queries: int, keys: int, position: int, segments: Segments, edge: Edge) -> list[tuple[slice, torch.Tensor]]:
    """The edges of a tile; `position` is that of its first query, counted from its first key."""
    hidden: list[tuple[slice, torch.Tensor]] = []
    if not segments.causal:
        return hidden
    # The first query sees no key after itself.
    right = max(position + 1, 0)
    if right < keys:
        hidden.append((slice(right, keys), edge(queries, keys - right, position - right, True)))
    # The last query sees no key before its window.
    if segments.window is not None:
        left = min(position + queries - segments.window, keys)
        if left > 0:
            hidden.append((slice(0, left), edge(queries, left, position - segments.window, False)))
    return hidden
