"""Attention of packed rows against softmax over a dense mask, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_rows import dense_attention, random_inputs, some_spans, visible
from rlvr.policy.attention import kernels, merged, tiles
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.merged import attend
from rlvr.policy.attention.padded import Padded
from rlvr.policy.attention.tiles import Tiles


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, 1, 4, 9, 1000]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.sampled_from([2, 3, 512]),
    st.sampled_from([None, 3, 5]),
    st.sampled_from([1, 64, 1 << 23]),
)
def test_outputs_and_gradients_are_those_of_a_dense_mask(seed, window, softcap, has_sinks, tile, keys, scores):
    rng = np.random.default_rng(seed)
    spans = some_spans(rng)
    inputs = random_inputs(rng, int(spans.length.sum()))
    sinks = torch.from_numpy(rng.normal(size=4)).requires_grad_() if has_sinks else None
    differentiated = [*inputs, sinks] if has_sinks else inputs
    scoring = ScoreRule(0.4, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "tiles_of", lambda *_: Tiles(scores, keys, queries=tile))
        patch.setattr(merged, "TOGETHER", tile)
        got = attend(*inputs, spans.segments(window), scoring, sinks)
        gradient = torch.from_numpy(rng.normal(size=got.shape))
        of_got = torch.autograd.grad(got, differentiated, gradient)
    want = dense_attention(*inputs, visible(spans, window), scoring.scale, softcap, sinks)
    of_want = torch.autograd.grad(want, differentiated, gradient)
    for ours, theirs in zip([got, *of_got], [want, *of_want], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("window", "softcap"), [(4, None), pytest.param(None, 2.0, marks=pytest.mark.slow)])
def test_gradcheck(window, softcap):
    rng = np.random.default_rng(3)
    spans = some_spans(rng)
    inputs = random_inputs(rng, int(spans.length.sum()), width=4)
    sinks = torch.from_numpy(rng.normal(size=4)).requires_grad_()

    def attention(query, key, value, sinks):
        return attend(query, key, value, spans.segments(window), ScoreRule(0.5, softcap), sinks)

    assert torch.autograd.gradcheck(attention, (*inputs, sinks))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 50.0), (7, 50.0)])
def test_large_scores_of_unequal_stretches_have_finite_gradients(window, softcap):
    """Scores that differ by more than float32's exp can show: what padding computes must not reach real tokens."""
    rng = np.random.default_rng(0)
    spans = some_spans(rng, lengths=[30, 12, 9, 5], contexts=[-1, -1, 0, 0])
    exact = [torch.from_numpy(rng.normal(size=(56, heads, 8)) * size) for heads, size in ((4, 12), (2, 12), (2, 1))]
    exact = [x.requires_grad_() for x in exact]
    rounded = [x.detach().float().requires_grad_() for x in exact]
    scores = torch.einsum("qhd,khd->hqk", exact[0], exact[1].repeat_interleave(2, 1)) * 8**-0.5
    assert scores.detach().abs().max() > 180
    gradient = torch.from_numpy(rng.normal(size=(56, 4, 8)))
    got = attend(*rounded, spans.segments(window), ScoreRule(8**-0.5, softcap))
    of_got = torch.autograd.grad(got, rounded, gradient.float())
    want = dense_attention(*exact, visible(spans, window), 8**-0.5, softcap)
    of_want = torch.autograd.grad(want, exact, gradient)
    for ours, theirs in zip([got, *of_got], [want, *of_want], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.0, atol=1e-4 * float(theirs.detach().abs().max()))


def test_tokens_out_of_sight_have_no_gradient():
    """The first of two runs that share nothing sees nothing of the second."""
    rng = np.random.default_rng(0)
    spans = some_spans(rng, lengths=[3, 5], contexts=[-1, -1])
    query, key, value = random_inputs(rng, 8)
    first = attend(query, key, value, spans.segments(None), ScoreRule(1.0))[:3].sum()
    for gradient in torch.autograd.grad(first, [query, key, value]):
        assert not gradient[3:].any()


@pytest.mark.parametrize("window", [None, 3])
def test_bfloat16_is_within_its_rounding(window):
    """Merged outputs are rounded once more: within 3 % of the largest number, where float64 says what is right."""
    rng = np.random.default_rng(5)
    spans = some_spans(rng, lengths=[6, 4, 5, 2, 3], contexts=[-1, 0, 1, 1, 0])
    exact = random_inputs(rng, 20, narrow=8)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    gradient = torch.from_numpy(rng.normal(size=(20, 4, 8)))
    want = attend(*exact, spans.segments(window), ScoreRule(0.3))
    got = attend(*rounded, spans.segments(window), ScoreRule(0.3))
    assert got.dtype == torch.bfloat16
    of_want = torch.autograd.grad(want, exact, gradient)
    of_got = torch.autograd.grad(got, rounded, gradient.bfloat16())
    for ours, theirs in zip([got, *of_got], [want, *of_want], strict=True):
        assert (ours.double() - theirs).abs().max() <= 0.03 * theirs.abs().max()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_products_of_16_bits_are_within_their_rounding(window, softcap, monkeypatch):
    """As on a GPU: factors in bfloat16, sums in float32. Products of bfloat16 are exact in float32."""
    asked = []

    def product(left, right, kind):
        assert left.dtype == right.dtype == torch.bfloat16 and kind == torch.float32
        asked.append(left.shape)
        return left.float() @ right.float()

    monkeypatch.setattr(tiles, "_product", product)
    monkeypatch.setattr(kernels, "tiles_of", lambda *_: Tiles(512, wide_sums=True, queries=4))
    # CpuFlash is what computes this without a window and a cap otherwise.
    monkeypatch.setattr(merged, "kernel_for", lambda query, *_: Padded(kernels.tiles_of()))
    rng = np.random.default_rng(2)
    spans = some_spans(rng, lengths=[9, 7, 5, 6, 3], contexts=[-1, 0, 1, 1, 0])
    rounded = [x.detach().bfloat16().requires_grad_() for x in random_inputs(rng, 30)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    gradient = torch.from_numpy(rng.normal(size=(30, 4, exact[2].shape[-1]))).bfloat16()
    want = dense_attention(*exact, visible(spans, window), 0.3, softcap)
    got = attend(*rounded, spans.segments(window), ScoreRule(0.3, softcap))
    of_want = torch.autograd.grad(want, exact, gradient.double())
    of_got = torch.autograd.grad(got, rounded, gradient)
    assert got.dtype == torch.bfloat16 and len(asked) >= 7
    # Half a unit of the last of 8 bits is 2e-3; a few of them add up.
    for ours, theirs in zip([got, *of_got], [want, *of_want], strict=True):
        assert (ours.double() - theirs).abs().max() <= 0.01 * theirs.abs().max()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_rounding_does_not_grow_with_the_levels_of_a_tree(has_sinks):
    """64 tokens behind 256 that are one run, four or sixteen, each of which continues the one before: the same tokens
    see the same. Each call's output is rounded to bfloat16, and what is merged of them once."""
    rng = np.random.default_rng(7)
    rounded = [torch.from_numpy(rng.normal(size=(320, heads, 16))).bfloat16() for heads in (4, 2, 2)]
    sinks = torch.from_numpy(rng.normal(size=4)) if has_sinks else None
    errors = {}
    for levels in (1, 4, 16):
        lengths = levels * [256 // levels] + [64]
        spans = some_spans(None, lengths=lengths, contexts=list(range(-1, levels)))
        got = attend(*rounded, spans.segments(None), ScoreRule(0.25), sinks)[256:]
        seen = visible(spans, None)
        want = dense_attention(*(x.double() for x in rounded), seen, 0.25, None, sinks)[256:]
        assert got.dtype == torch.bfloat16
        errors[levels] = float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
    # Rounding to 8 bits is 1.7e-3 of a number in the root mean square.
    assert 1e-3 < errors[1] < 3e-3
    assert errors[4] < 1.05 * errors[1] and errors[16] < 1.05 * errors[1]


def test_autocast_decides_the_precision():
    """Rotary embeddings leave queries and keys in float32 under autocast, values come in bfloat16."""
    rng = np.random.default_rng(1)
    spans = some_spans(rng, lengths=[4, 3], contexts=[-1, 0])
    query, key, value = (x.detach().float() for x in random_inputs(rng, 7))
    with torch.autocast("cpu", torch.bfloat16):
        got = attend(query, key, value.bfloat16(), spans.segments(None), ScoreRule(0.3))
    want = attend(query, key, value, spans.segments(None), ScoreRule(0.3))
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.03 * want.abs().max()
