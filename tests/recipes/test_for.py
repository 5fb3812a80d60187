"""Flow of reasoning: each response becomes as likely as its reward says (arXiv 2406.05673; Yu-Fangxu/FoR@84c8f82).

BlocksWorld/util.py, tb_loss with logpartition: the mean over a problem's trajectories of (s - mean s)^2, s = log pi -
log R. Game24/lightning_module.py: R is 100 where the numbers make 24, and 0.001 where they do not.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, Response, score_function, softmax

from rlvr.records import Task

TASK = Task(id="t", prompt="Use 4, 9, 10 and 13.", answer=24, info={"numbers": [4, 9, 10, 13]})
GOOD, BAD = 100.0, 0.001
# (text, right)
RESPONSES = [
    ("\\boxed{(10 - 4) * (13 - 9)}", True),
    ("13 - 9 is 4, 10 - 4 is 6.\n\\boxed{(13 - 9) * (10 - 4)}", True),
    ("\\boxed{4 * (10 - 13 + 9)}", True),
    ("\\boxed{(10 - 4) / (1 / 4)}? No: \\boxed{(9 - 13) * (4 - 10)}", True),
    ("\\boxed{4 + 9 + 10 + 13}", False),
    ("\\boxed{4 * (10 - 4)}", False),
    ("\\boxed{24}", False),
    ("\\boxed{(10 - 4) * 4}", False),
    ("I find no way.", False),
    ("", False),
]


@pytest.fixture
def step(recipe_step):
    return recipe_step("for", [TASK])


def gradient(rights, responses, now):
    logs = np.log(softmax(now))
    scores = [sum(logs[list(ids)]) - math.log(GOOD if r else BAD) for r, ids in zip(rights, responses, strict=True)]
    mean = sum(scores) / len(scores)
    result = np.zeros(len(now))
    for score, ids in zip(scores, responses, strict=True):
        result += 2 * (score - mean) * score_function(ids, now) / len(responses)
    return result


def batch_of(step, rights, responses):
    texts = [RESPONSES[0 if right else 4][0] for right in rights]
    return step.score([[Response(text, ids) for text, ids in zip(texts, responses, strict=True)]])


def test_ten_responses(step):
    """Any expression that uses each number once and makes 24 is right, and nothing else is."""
    assert step.rewards([text for text, _ in RESPONSES]) == [float(right) for _, right in RESPONSES]


def test_gradient(step):
    """Of whole responses, whose log-probs are summed; old and engine log-probs say nothing. The recipe's 100.001 is the
    authors' 100 up to 1e-5 nats."""
    rights, ids = [1, 0, 0, 1, 1], [(0, 1, 2, 3), (1,), (2, 1, 2), (3,), (0, 0)]
    batch = batch_of(step, rights, ids)
    for old in (None, BEFORE):
        got = step.gradient(batch, MOVED, old=old, engine=ENGINE)
        np.testing.assert_allclose(got, gradient(rights, ids, MOVED), rtol=1e-4)


def test_nothing_is_learned_where_probabilities_are_proportional_to_rewards(step):
    """Two right responses alike, and a wrong one 100,000 times less likely."""
    p = GOOD / (2 * GOOD + BAD)
    batch = batch_of(step, [1, 1, 0], [(0,), (1,), (2,)])
    at_rest = step.gradient(batch, [math.log(p), math.log(p), math.log(p * BAD / GOOD)])
    assert np.abs(at_rest).max() < 1e-4
    assert np.abs(step.gradient(batch, [0.0, 0.0, 0.0])).max() > 1


def test_the_less_likely_one_of_two_right_responses_is_raised(step):
    """Reinforcement of the right ones would have no gradient at all in this group: diversity is what is learned."""
    batch = batch_of(step, [1, 1], [(0,), (1,)])
    common, rare = step.gradient(batch, [math.log(0.9), math.log(0.1)])
    assert rare < 0 < common
