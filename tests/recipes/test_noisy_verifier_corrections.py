"""Corrections for a noisy verifier: unbiased over its errors, and the numbers of Cai et al. 2025."""

from __future__ import annotations

import math

import numpy as np
import pytest

from advantage_helpers import batch_of
from rlvr.advantages import GroupAdvantage
from rlvr.recipes.noisy_verifier_corrections.noise import Noise


@pytest.mark.parametrize(("fp", "fn"), [(0.1, 0.3), (0.0, 0.4), (0.25, 0.0)])
def test_noise_corrections_are_unbiased_over_the_verifiers_errors(fp, fn):
    """By expectation over both outcomes of the check of one right and one wrong answer, with a1 and a0 held."""
    a1, a0, d = 1.5, -0.5, 1 - fp - fn
    batch = batch_of([1.0, 0.0])
    backward = Noise("backward", fp, fn)(batch, np.asarray([a1, a0]))
    forward = Noise("forward", 0.0, fn)(batch, np.asarray([a1, a0]))
    for accepted, of_right, of_wrong in ((backward, a1, a0), (forward, 0.0, -d * (a1 - a0))):
        if accepted is forward:
            right = (1 - fn) * forward[0] + fn * forward[1]
            wrong = fp * forward[0] + (1 - fp) * forward[1]
        else:
            right = (1 - fn) * backward[0] + fn * backward[1]
            wrong = fp * backward[0] + (1 - fp) * backward[1]
        assert right == pytest.approx(of_right)
        assert wrong == pytest.approx(of_wrong)


def test_noise_corrections_of_the_reward_itself_are_those_of_the_paper():
    """Cai et al. 2025: backward (r - fp) / (1 - fp - fn), forward fn for 1 and fn - 1 for 0, and as constant
    baselines."""
    batch, fp, fn = batch_of([1.0, 0.0, 1.0, 0.0, math.nan], [0, 0, 0, 0, 0]), 0.2, 0.3
    raw = GroupAdvantage("none", "none")(batch)
    np.testing.assert_allclose(Noise("backward", fp, fn)(batch, raw), [1.6, -0.4, 1.6, -0.4, 0])
    np.testing.assert_allclose(GroupAdvantage(fp, 1 - fp - fn)(batch), [1.6, -0.4, 1.6, -0.4, 0])
    np.testing.assert_allclose(Noise("forward", fp, fn)(batch, raw), [0.3, -0.7, 0.3, -0.7, 0])
    np.testing.assert_allclose(GroupAdvantage(1 - fn, "none")(batch), [0.3, -0.7, 0.3, -0.7, 0])


def test_noise_changes_normalised_advantages_where_a_corrected_reward_does_not():
    rewards = np.asarray([1.0, 0.0, 0.0, 0.0])
    batch = batch_of(rewards)
    plain = GroupAdvantage(epsilon=1e-12)(batch)
    corrected = GroupAdvantage(epsilon=1e-12)(batch_of((rewards - 0.1) / 0.7))
    np.testing.assert_allclose(corrected, plain, atol=1e-9)
    after = Noise("backward", 0.1, 0.2)(batch, plain)
    assert np.abs(after - plain).max() > 0.1
    assert abs(after @ plain / np.linalg.norm(after) / np.linalg.norm(plain)) < 0.9999, (
        "another direction, not another size"
    )
    same = batch_of([1.0, 1.0, 0.0], [0, 0, 1])
    np.testing.assert_array_equal(Noise("forward", 0.0, 0.2)(same, np.asarray([0.5, 0.25, 0.125])), [0.5, 0.25, 0.125])
