"""Packed rows for tests of attention, and what their tokens see, token by token."""

from __future__ import annotations

import numpy as np
import torch

from rlvr.policy.attention import Spans


def some_spans(rng, lengths=None, contexts=None):
    """Up to eight runs, each of which continues nothing or any run before it."""
    if lengths is None:
        lengths = rng.integers(1, 12, int(rng.integers(1, 9)))
        contexts = [int(rng.integers(-1, s)) if s else -1 for s in range(len(lengths))]
    return Spans(np.asarray(lengths), np.asarray(contexts), torch.device("cpu"))


def visible(spans, window):
    """bool [N, N]: whether a query (row) sees a key, from the definition."""
    owner = np.repeat(np.arange(len(spans.length)), spans.length)
    above = {-1: set()}
    position = {-1: 0}
    for run, context in enumerate(spans.context.tolist()):
        above[run] = {context} | above[context]
        position[run] = position[context] + (int(spans.length[context]) if context >= 0 else 0)
    first = np.cumsum(spans.length) - spans.length
    places = [position[run] + place - first[run] for place, run in enumerate(owner)]
    table = np.zeros((len(owner), len(owner)), dtype=bool)
    for q, run in enumerate(owner):
        for k, other in enumerate(owner):
            seen = (run == other and k <= q) or other in above[run]
            table[q, k] = seen and (window is None or places[q] - places[k] < window)
    return table


def random_inputs(rng, tokens, width=8, narrow=None):
    """Queries of 4 heads, keys and values of 1, 2 or 4, in float64; values may be narrower (MLA)."""
    groups = int(rng.choice([1, 2, 4]))
    narrow = narrow or int(rng.choice([width, width // 2]))
    shapes = [(tokens, 4, width), (tokens, groups, width), (tokens, groups, narrow)]
    return [torch.from_numpy(rng.normal(size=shape)).requires_grad_() for shape in shapes]


def dense_attention(query, key, value, seen, scale, softcap=None, sinks=None):
    """[N, H, D], [N, G, D], [N, G, E] -> [N, H, E]: softmax over the keys that `seen` [N, N] shows."""
    repeats = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    probabilities = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khe->qhe", probabilities, value.repeat_interleave(repeats, 1))
