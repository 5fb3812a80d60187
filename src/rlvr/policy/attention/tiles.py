"""Attention in tiles of plain torch: for devices, precisions, caps and windows that no kernel of torch's computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlvr.policy.attention.calls import Gradients, ScoreRule, Segments

TILE = 512
"""Queries and keys of a tile of `tile_forward`: large enough for matrix products, and at a length of 16384 the tiles on
the diagonal have 3 % more pairs than are visible."""
SCORES = 1 << 23
"""Most scores of a tile, of all heads and of the stretches that are computed together: 32 MiB in float32. At least one
stretch is computed, whose tile has heads x TILE^2 scores: 28 MiB for the 28 heads of Qwen2.5-7B."""


@dataclass(frozen=True)
class _Tile:
    """A tile of a block's pairs: queries [first, end), keys [first_key, end_key)."""

    first: int
    end: int
    first_key: int
    end_key: int
    hidden: torch.Tensor | None
    """bool [queries, keys]: pairs that are not visible; None: all are"""

    @property
    def queries(self) -> slice:
        return slice(self.first, self.end)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.end_key)


def _tiles(queries: int, keys: int, segments: Segments, device: torch.device) -> list[list[_Tile]]:
    """The tiles that have visible pairs, those of the same queries together."""
    before = keys - queries  # position of query 0 among the keys, in a causal call
    rows = []
    for first in range(0, queries, TILE):
        end = min(first + TILE, queries)
        # A causal query at position p sees the keys up to p, from p - window + 1 on.
        highest = before + end if segments.causal else keys
        lowest = 0
        if segments.window is not None:
            lowest = max(before + first - segments.window + 1, 0)
        row = []
        for first_key in range(lowest // TILE * TILE, highest, TILE):
            start = max(first_key, lowest)
            stop = min(first_key + TILE, highest)
            row.append(_Tile(first, end, start, stop, _hidden(first, end, start, stop, before, segments, device)))
        rows.append(row)
    return rows


def _parts(rows: int, heads: int, queries: int, keys: int) -> list[slice]:
    """The rows of a block, those that are computed together in one slice; so no tile grows with the row of tokens."""
    scores = heads * min(queries, TILE) * min(keys, TILE)
    together = max(1, SCORES // scores)
    return [slice(first, min(first + together, rows)) for first in range(0, rows, together)]


def _hidden(
    first: int, end: int, first_key: int, end_key: int, before: int, segments: Segments, device: torch.device
) -> torch.Tensor | None:
    """bool [queries, keys] of a tile; None where all pairs are visible."""
    if not segments.causal:
        return None
    # The nearest pair is the first query with the last key, the furthest the last query with the first key.
    above = end_key - 1 > before + first
    beyond = segments.window is not None and before + end - 1 - first_key >= segments.window
    if not above and not beyond:
        return None
    position = torch.arange(before + first, before + end, device=device)[:, None]
    place = torch.arange(first_key, end_key, device=device)
    hidden = place > position
    if segments.window is not None:
        hidden = hidden | (position - place >= segments.window)
    return hidden


def _scores(
    query: torch.Tensor, key: torch.Tensor, tile: _Tile, scoring: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores [R, G, H / G, queries, keys] of a tile, hidden pairs at -inf, and what the products' gradient is
    multiplied with for the cap, without which it is None."""
    scores = scoring.scale * torch.einsum("rghqd,rgkd->rghqk", query, key)
    slope = None
    if scoring.softcap is not None:
        bent = torch.tanh(scores / scoring.softcap)
        slope = 1 - bent * bent
        scores = scoring.softcap * bent
    if tile.hidden is not None:
        scores = scores.masked_fill(tile.hidden, -torch.inf)
    return scores, slope


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type that tiles are computed and added up in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a block, tile by tile: [R, H, L, D], [R, G, K, D], [R, G, K, E] -> [R, H, L, E], [R, H, L]."""
    rows, heads, queries, _ = query.shape
    output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:-1], dtype=_accumulated(query.dtype), device=query.device)
    for part in _parts(rows, heads, queries, key.shape[2]):
        _forward_part(query[part], key[part], value[part], output[part], lse[part], segments, scoring)
    return output, lse


def _forward_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scoring: ScoreRule,
) -> None:
    """Some rows of `tile_forward`, into `output` and `lse`.

    The running maximum and sum of each query are those of flash attention (Dao et al. 2022, algorithm 1).
    """
    kind = lse.dtype
    groups = key.shape[1]
    q = query.to(kind).unflatten(1, (groups, -1))
    k = key.to(kind)
    v = value.to(kind)
    for row in _tiles(query.shape[2], key.shape[2], segments, query.device):
        queries = row[0].queries
        shape = q[..., queries, :].shape[:-1]
        # Finite, so that a tile without a visible key for some query adds exp(-inf) = 0 and not NaN.
        largest = torch.full(shape, torch.finfo(kind).min, dtype=kind, device=q.device)
        total = torch.zeros(shape, dtype=kind, device=q.device)
        weighted = torch.zeros((*shape, v.shape[-1]), dtype=kind, device=q.device)
        for tile in row:
            scores, _ = _scores(q[..., queries, :], k[:, :, tile.keys], tile, scoring)
            top = torch.maximum(largest, scores.amax(-1))
            shrunk = torch.exp(largest - top)
            exponentials = torch.exp(scores - top[..., None])
            total = total * shrunk + exponentials.sum(-1)
            added = torch.einsum("rghqk,rgke->rghqe", exponentials, v[:, :, tile.keys])
            weighted = weighted * shrunk[..., None] + added
            largest = top
        output[:, :, queries] = (weighted / total[..., None]).flatten(1, 2)
        lse[:, :, queries] = (largest + torch.log(total)).flatten(1, 2)


def tile_backward(
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
    rows, heads, queries, _ = query.shape
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for part in _parts(rows, heads, queries, key.shape[2]):
        of_part = _backward_part(
            gradient[part], query[part], key[part], value[part], output[part], lse[part], segments, scoring
        )
        for whole, own in zip(gradients, of_part, strict=True):
            whole[part] = own
    return gradients


def _backward_part(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scoring: ScoreRule,
) -> Gradients:
    """Some rows of `tile_backward`, in which the probabilities are computed again (Dao et al. 2022, algorithm 4)."""
    kind = _accumulated(query.dtype)
    groups = key.shape[1]
    q, given, out = (x.to(kind).unflatten(1, (groups, -1)) for x in (query, gradient, output))
    k = key.to(kind)
    v = value.to(kind)
    sums = lse.to(kind).unflatten(1, (groups, -1))
    mean = (given * out).sum(-1)
    of_query = torch.zeros_like(q)
    of_key = torch.zeros_like(k)
    of_value = torch.zeros_like(v)
    for row in _tiles(query.shape[2], key.shape[2], segments, query.device):
        queries = row[0].queries
        for tile in row:
            scores, slope = _scores(q[..., queries, :], k[:, :, tile.keys], tile, scoring)
            probabilities = torch.exp(scores - sums[..., queries, None])
            of_value[:, :, tile.keys] += torch.einsum("rghqk,rghqe->rgke", probabilities, given[..., queries, :])
            of_scores = torch.einsum("rghqe,rgke->rghqk", given[..., queries, :], v[:, :, tile.keys])
            of_scores = probabilities * (of_scores - mean[..., queries, None])
            if slope is not None:
                of_scores = of_scores * slope
            of_query[..., queries, :] += scoring.scale * torch.einsum(
                "rghqk,rgkd->rghqd", of_scores, k[:, :, tile.keys]
            )
            of_key[:, :, tile.keys] += scoring.scale * torch.einsum("rghqk,rghqd->rgkd", of_scores, q[..., queries, :])
    return of_query.flatten(1, 2), of_key, of_value
