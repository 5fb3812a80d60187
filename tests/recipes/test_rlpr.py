"""RLPR: 0.9 of the gain in the reference answer's mean probability, where it is a gain, plus 0.1 for the form."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.components import Continuation
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch
from rlvr.rewards import build_terms

FORMED = "<think> a </think> <answer> b </answer>"


@pytest.mark.parametrize(
    ("text", "after", "before", "expected"),
    [
        (FORMED, [0.9, 0.7], [0.2, 0.4], 0.9 * 0.5 + 0.1),
        (FORMED, [0.1, 0.3], [0.2, 0.4], 0.1),
        ("a <answer> b </answer>", [0.9, 0.7], [0.2, 0.4], 0.9 * 0.5),
        # One certain token and one that is impossible: a mean of probabilities, which a product would make 0.
        (FORMED, [1.0, 1e-9], [0.25, 0.25], 0.9 * 0.25 + 0.1),
    ],
)
def test_the_reward(make_rollout, text, after, before, expected):
    rollout = make_rollout([9, 1, 2], prompt=1, text=text)
    batch = Batch([rollout])
    likelihood, form = build_terms(find_paper("rlpr").config.rewards)
    # The answer after the reasoning, and without it.
    scored = [(Continuation(0, [9, 1], [3, 4]), np.log(after)), (Continuation(-1, [9], [3, 4]), np.log(before))]
    gain = likelihood.function(batch, scored=scored)
    got = likelihood.weight * gain + form.weight * form.function(batch)
    assert got == pytest.approx([expected], abs=1e-6)
