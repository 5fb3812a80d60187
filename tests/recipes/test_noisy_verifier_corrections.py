"""Corrections for a noisy verifier: unbiased over its errors, and the numbers of Cai et al. 2025."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, policy_gradient

from advantage_helpers import batch_of
from rlvr.advantages import GroupAdvantage
from rlvr.recipes.noisy_verifier_corrections.noise import Noise
from rlvr.records import Task


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


TASK = Task(id="t", prompt="What is 1 + 1?", answer="2")
LOGITS = [0.3, -0.2, 0.5, 0.1]
RIGHT, WRONG = "so \\boxed{2}", "so \\boxed{3}"
GROUP = [(RIGHT, (0, 1)), (WRONG, (2,)), (WRONG, (1, 3, 3)), (RIGHT, (3,)), (WRONG, (0, 0))]


def shipped(right, count):
    """Advantages of an accepted and a rejected response at the recipe's rate of 0.1: GRPO's differ by one deviation's
    inverse, of which a rejected one loses 0.9 and an accepted one keeps 0.1."""
    deviation = math.sqrt(right * (count - right)) / count
    apart = 1 / (deviation + 1e-4)
    return 0.1 * apart, -0.9 * apart


def test_advantages_at_the_shipped_rate(recipe_step):
    step = recipe_step("noisy-verifier-corrections", [TASK])
    for right in range(1, 10):
        texts = [RIGHT] * right + [WRONG] * (10 - right)
        got = step.score([[Response(text, (1,)) for text in texts]]).column("advantage")
        accepted, rejected = shipped(right, 10)
        np.testing.assert_allclose(got, [accepted] * right + [rejected] * (10 - right), rtol=1e-9)
    # A right answer, rejected once in ten times, has no advantage on the mean; a wrong one has less than none.
    assert 0.9 * accepted + 0.1 * rejected == pytest.approx(0, abs=1e-12)
    # Where all are accepted there is nothing to correct.
    same = step.score([[Response(RIGHT, (1,)), Response(RIGHT, (2,))]]).column("advantage")
    assert same.tolist() == [0.0, 0.0]


def test_gradient_at_the_shipped_rate(recipe_step):
    step = recipe_step("noisy-verifier-corrections", [TASK])
    got = step.gradient(step.score([[Response(text, ids) for text, ids in GROUP]]), LOGITS)
    accepted, rejected = shipped(2, 5)
    advantages = [accepted if text == RIGHT else rejected for text, _ in GROUP]
    expected = policy_gradient(advantages, [ids for _, ids in GROUP], LOGITS, "sequences")
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    plain = [0.6 if text == RIGHT else -0.4 for text, _ in GROUP]
    other = policy_gradient(plain, [ids for _, ids in GROUP], LOGITS, "sequences")
    assert abs(got @ other) < 0.9 * np.linalg.norm(got) * np.linalg.norm(other), "another direction than GRPO's"
