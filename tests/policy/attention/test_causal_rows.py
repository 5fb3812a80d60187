"""Attention of prompts that an engine reads, against a softmax over a dense table of what each token sees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from attention_rows import dense_attention
from rlvr.policy.attention import causal_rows, tiles
from rlvr.policy.attention.causal_rows import CausalRows

SCALE = 0.3


def dense(query, key, value, window):
    """[L, H, D], [L, G, D], [L, G, E] -> [L, H, E]"""
    place = np.arange(len(query))
    behind = place[:, None] - place
    return dense_attention(query, key, value, (behind >= 0) & (behind < window), SCALE)


def inputs(seed, rows, length, heads, groups, dtype):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, length, count, 8) for count in (heads, groups, groups)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_each_token_sees_those_up_to_itself(dtype, heads, groups, window, monkeypatch):
    monkeypatch.setattr(tiles, "QUERIES", 4)
    monkeypatch.setattr(tiles, "CPU_KEYS", 4)
    query, key, value = inputs(1, 3, 11, heads, groups, dtype)
    got = CausalRows(3, 11, torch.device("cpu")).attend(query, key, value, SCALE, window)
    assert got.dtype == dtype
    for row in range(3):
        want = dense(query[row].double(), key[row].double(), value[row].double(), window or 11)
        assert float((got[row] - want).abs().max()) < (1e-6 if dtype == torch.float32 else 2e-2)


class Stretches:
    """A kernel that takes stretches of any length, by the dense table."""

    def forward(self, query, key, value, segments, scoring):
        assert scoring.scale == SCALE and segments.causal
        offsets = segments.varlen.query_offsets.tolist()
        parts = [slice(*pair) for pair in itertools.pairwise(offsets)]
        window = segments.window or len(query)
        return torch.cat([dense(query[part], key[part], value[part], window) for part in parts]), None


@pytest.mark.parametrize("window", [None, 5])
def test_a_kernel_of_variable_lengths_gets_row_after_row(window, monkeypatch):
    monkeypatch.setattr(causal_rows, "kernel_for", lambda *_: Stretches())
    query, key, value = inputs(2, 3, 11, 6, 2, torch.float64)
    got = CausalRows(3, 11, torch.device("cpu")).attend(query, key, value, SCALE, window)
    for row in range(3):
        want = dense(query[row], key[row], value[row], window or 11)
        torch.testing.assert_close(got[row], want, rtol=1e-12, atol=1e-12)
