"""SAR: the drop in perplexity that the prompt makes, worked by hand."""

from __future__ import annotations

import numpy as np

from reward_helpers import make_batch
from rlvr.recipes.sar.self_aligned import SelfAligned


def encode(text):
    return [ord(c) for c in text] or [0]


def test_the_drop_in_perplexity():
    """With the prompt 0.5 each, ppl 2; without 0.25, ppl 4: a half less. Worse with the prompt: below 0, at least
    -1."""
    piece, batch = SelfAligned(), make_batch([1.0] * 3, [2, 0, 1])
    asked = piece.asks(batch, encode)
    assert [(c.rollout, len(c.context)) for c in asked] == [(0, 2), (-1, 1), (2, 2), (-3, 1)]
    logprobs = [np.log([0.5, 0.5]), np.log([0.25, 0.25]), np.log([0.001]), np.log([0.5])]
    got = piece(batch, list(zip(asked, logprobs, strict=True)))
    np.testing.assert_allclose(got, [0.5, np.nan, -1])
