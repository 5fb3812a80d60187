"""Self-Rewarded Efficiency RL: the shipped bonus for short right answers, by ten responses and the gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, plan_of, policy_gradient

from rlvr.records import Task

SLUG = "efficiency-steering-self-rewarded-efficiency-rl"
TASK = Task(id="t", prompt="What is 1 + 1?", answer="2")
LOGITS = [0.3, -0.2, 0.5, 0.1]
# (right, tokens, reward): the shortest right answer of four tokens has 3/2, the longest of twelve 1.
TEN = [
    (True, 4, 1.5),
    (True, 12, 1.0),
    (True, 8, 1.25),
    (True, 6, 1.375),
    (True, 4, 1.5),
    (False, 1, 0.0),
    (False, 4, 0.0),
    (False, 20, 0.0),
    (True, 10, 1.125),
    (False, 12, 0.0),
]


def response(right, length, number=0):
    ids = tuple((number + place) % len(LOGITS) for place in range(length))
    return Response("so \\boxed{2}" if right else "so \\boxed{3}", ids)


@pytest.fixture
def step(recipe_step):
    return recipe_step(SLUG, [TASK])


def test_ten_rewards(step):
    batch = step.score([[response(right, length) for right, length, _ in TEN]])
    assert batch.column("reward").tolist() == [reward for _, _, reward in TEN]


def test_wrong_answers_do_not_count_for_the_lengths(step):
    """The only right answer has the whole reward and no bonus, however short the wrong ones are."""
    batch = step.score([[response(True, 9), response(False, 2), response(False, 30)]])
    assert batch.column("reward").tolist() == [1.0, 0.0, 0.0]


def test_a_group_that_is_right_throughout_learns_to_be_short(step):
    """The plain reward has no gradient there."""
    batch = step.score([[response(True, length) for length in (2, 4, 6)]])
    advantages = batch.column("advantage")
    assert advantages[0] > 0 > advantages[2]
    assert advantages[1] == pytest.approx(0, abs=1e-12)


def test_gradient(step):
    group = [response(right, length, number) for number, (right, length, _) in enumerate(TEN)]
    got = step.gradient(step.score([group]), LOGITS)
    advantages = of_the_group([reward for _, _, reward in TEN])
    expected = policy_gradient(advantages, [one.ids for one in group], LOGITS, "sequences")
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_there_is_no_other_term():
    algorithm = plan_of(SLUG).config.algorithm
    assert algorithm.kl is None
    assert algorithm.entropy == 0
    assert not algorithm.auxiliary
