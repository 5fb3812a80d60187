"""TOPR: a wrong response pushes with its ratio cut to [0, 1], a right one pulls with 1 (arXiv 2503.14286, eq. 7 and 8).

Rewards of 1 and -1 without a baseline, and a loss divided by the response's length, are the paper's section 4.1.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, Response, score_function, softmax

from rlvr.records import Task

TASK = Task(id="t", prompt="A pen costs 2. What do two cost?", answer="4")
# (text, right)
RESPONSES = [
    ("Two pens cost 2 + 2 = 4. \\boxed{4}", True),
    ("\\boxed{4}", True),
    ("Each is $2, so \\boxed{\\$4}.", True),
    ("\\boxed{5}? No: \\boxed{4}", True),
    ("so " * 100 + "\\boxed{4.00}", True),
    ("Two pens cost 2 x 3 = 6. \\boxed{6}", False),
    ("\\boxed{4}? No: \\boxed{5}", False),
    ("I do not know.", False),
    ("\\boxed{}", False),
    ("", False),
]
RIGHT, WRONG = RESPONSES[0][0], RESPONSES[5][0]
UPDATES = 8
"""Optimizer steps of a batch, chosen here: with one of them no weight would differ from 1."""


@pytest.fixture
def step(recipe_step):
    return recipe_step("topr", [TASK])


def gradient(rewards, responses, now, sampled):
    """- mean over responses of w R / length grad log pi(response); w = 1 for R > 0, else min(pi / mu, 1) of the whole
    response, a constant."""
    result = np.zeros(len(now))
    ratio = softmax(now) / softmax(sampled)
    for reward, ids in zip(rewards, responses, strict=True):
        weight = 1.0 if reward > 0 else min(float(np.prod(ratio[list(ids)])), 1.0)
        result -= weight * reward / len(ids) * score_function(ids, now)
    return result / len(responses)


def test_ten_responses(step):
    texts = [text for text, _ in RESPONSES]
    expected = [1.0 if right else -1.0 for _, right in RESPONSES]
    assert step.rewards(texts) == expected
    # No baseline: the advantage of a response is its reward, whatever its group.
    batch = step.score([[Response(text) for text in texts[3:]]])
    assert batch.column("advantage").tolist() == expected[3:]


# Ratios of MOVED to BEFORE of these responses: 1.4, 0.41, 25, 0.29 and 5.
IDS = [(0, 1, 2, 3), (2, 1, 0, 3, 3), (0, 0), (3,), (0,)]
TEXTS = [RIGHT, WRONG, WRONG, RIGHT, WRONG]
REWARDS = [1.0, -1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize("sampled", [BEFORE, ENGINE])
def test_gradient_of_a_moved_policy(step, sampled):
    """The ratio is to the policy that sampled, in the first update too, and no token's own ratio counts."""
    batch = step.score([[Response(text, ids) for text, ids in zip(TEXTS, IDS, strict=True)]])
    expected = gradient(REWARDS, IDS, MOVED, sampled)
    np.testing.assert_allclose(step.gradient(batch, MOVED, engine=sampled), expected, rtol=1e-9)
    np.testing.assert_allclose(step.gradient(batch, MOVED, old=BEFORE, engine=sampled), expected, rtol=1e-9)


def test_an_unlikely_wrong_response_is_left_alone_and_an_unlikely_right_one_is_learned(step):
    """A token that the policy has become 1,000 times less likely to write: REINFORCE would push a wrong one further
    down without end, importance sampling would forget a right one."""
    sampled, now = [0.0, 0.0], [0.0, -np.log(1999.0)]
    assert softmax(now)[1] / softmax(sampled)[1] == pytest.approx(1e-3)
    slopes = {}
    for text in (RIGHT, WRONG):
        batch = step.score([[Response(text, (1,))]])
        slopes[text] = step.gradient(batch, now, engine=sampled)[1]
    away = 1 - softmax(now)[1]
    assert slopes[RIGHT] == pytest.approx(-away)
    assert slopes[WRONG] == pytest.approx(1e-3 * away)


def test_the_shipped_updates_let_the_weights_act(recipe_step):
    """The first update is REINFORCE, whose weights are 1; the seven others of the batch are tapered."""
    tasks = [Task(id=str(n), prompt="?", answer="4") for n in range(UPDATES)]
    groups = [[Response(WRONG, (1,)), Response(WRONG, (1, 2)), Response(RIGHT, (3,))]] * UPDATES
    got = recipe_step("topr", tasks).after_the_updates(groups, BEFORE, 0.5)
    expected, weightless = np.asarray(BEFORE), np.asarray(BEFORE)
    for _ in range(UPDATES):
        rewards, ids = [-1.0, -1.0, 1.0], [(1,), (1, 2), (3,)]
        expected = expected - 0.5 * gradient(rewards, ids, expected, BEFORE)
        weightless = weightless - 0.5 * gradient(rewards, ids, weightless, weightless)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    # Without the weights the wrong token would have become less than half as likely.
    assert softmax(weightless)[1] < 0.5 * softmax(got)[1]
