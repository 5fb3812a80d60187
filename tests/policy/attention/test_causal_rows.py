"""Attention of prompts that an engine reads, against a softmax over a dense table of what each token sees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from attention_rows import dense_attention
from rlvr.policy.attention import causal_rows, tiles
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.causal_rows import CausalRows

SCALE = 0.3
SINKS = torch.linspace(-1, 2, 6, dtype=torch.float64)
"""A score for each of six heads."""


def dense(query, key, value, window, softcap=None, sinks=None):
    """[L, H, D], [L, G, D], [L, G, E] -> [L, H, E]"""
    place = np.arange(len(query))
    behind = place[:, None] - place
    return dense_attention(query, key, value, (behind >= 0) & (behind < window), SCALE, softcap, sinks)


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
    got = CausalRows(3, 11, torch.device("cpu")).attend(query, key, value, ScoreRule(SCALE), window)
    assert got.dtype == dtype
    for row in range(3):
        want = dense(query[row].double(), key[row].double(), value[row].double(), window or 11)
        assert float((got[row] - want).abs().max()) < (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("softcap", "sinks"), [(0.7, None), (None, SINKS), (0.7, SINKS)])
@pytest.mark.parametrize("window", [None, 5])
def test_soft_caps_and_sinks(softcap, sinks, window, monkeypatch):
    monkeypatch.setattr(tiles, "QUERIES", 4)
    monkeypatch.setattr(tiles, "CPU_KEYS", 4)
    query, key, value = inputs(3, 3, 11, 6, 2, torch.float64)
    got = CausalRows(3, 11, torch.device("cpu")).attend(query, key, value, ScoreRule(SCALE, softcap), window, sinks)
    for row in range(3):
        want = dense(query[row], key[row], value[row], window or 11, softcap, sinks)
        torch.testing.assert_close(got[row], want, rtol=1e-10, atol=1e-10)


class Stretches:
    """A kernel that takes stretches of any length, by the dense table."""

    def forward(self, query, key, value, segments, scoring):
        assert scoring.scale == SCALE and segments.causal
        offsets = segments.varlen.query_offsets.tolist()
        parts = [slice(*pair) for pair in itertools.pairwise(offsets)]
        window = segments.window or len(query)
        output = torch.cat([dense(query[part], key[part], value[part], window) for part in parts])
        return output, torch.cat([self.sums(query[part], key[part], window) for part in parts], 1)

    def sums(self, query, key, window):
        """The log-sum-exp of the scores of each query, [H, L]."""
        place = torch.arange(len(query))
        behind = place[:, None] - place
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1)) * SCALE
        return scores.masked_fill((behind < 0) | (behind >= window), -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("window", [None, 5])
def test_a_kernel_of_variable_lengths_gets_row_after_row(window, sinks, monkeypatch):
    monkeypatch.setattr(causal_rows, "kernel_for", lambda *_: Stretches())
    query, key, value = inputs(2, 3, 11, 6, 2, torch.float64)
    got = CausalRows(3, 11, torch.device("cpu")).attend(query, key, value, ScoreRule(SCALE), window, sinks)
    for row in range(3):
        want = dense(query[row], key[row], value[row], window or 11, sinks=sinks)
        torch.testing.assert_close(got[row], want, rtol=1e-12, atol=1e-12)
