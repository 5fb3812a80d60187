"""Attention of packed rows against softmax over a dense mask, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_rows import dense_attention, random_inputs, some_spans, visible
from rlvr.policy.attention import merged, tiles
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.merged import attend


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, 1, 4, 9, 1000]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.sampled_from([2, 3, 512]),
    st.sampled_from([1, 64, 1 << 23]),
)
def test_outputs_and_gradients_are_those_of_a_dense_mask(seed, window, softcap, has_sinks, tile, scores):
    rng = np.random.default_rng(seed)
    spans = some_spans(rng)
    inputs = random_inputs(rng, int(spans.length.sum()))
    sinks = torch.from_numpy(rng.normal(size=4)).requires_grad_() if has_sinks else None
    differentiated = [*inputs, sinks] if has_sinks else inputs
    scoring = ScoreRule(0.4, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", tile)
        patch.setattr(tiles, "SCORES", scores)
        patch.setattr(merged, "TOGETHER", tile)
        got = attend(*inputs, spans.segments(window), scoring, sinks)
        gradient = torch.from_numpy(rng.normal(size=got.shape))
        of_got = torch.autograd.grad(got, differentiated, gradient)
    want = dense_attention(*inputs, visible(spans, window), scoring.scale, softcap, sinks)
    of_want = torch.autograd.grad(want, differentiated, gradient)
    for ours, theirs in zip([got, *of_got], [want, *of_want], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0)])
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
