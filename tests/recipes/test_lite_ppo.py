"""Lite PPO: the group's mean with the batch's deviation, and the mean over tokens.

The numbers are those of github alibaba/ROLL, commit 8eb27cc: docs_roll/docs/User Guides/Algorithms/LitePPO.md and
roll/utils/functionals.py (`reward_norm`: torch.std, which has n - 1, and 1e-6).
"""

from __future__ import annotations

import statistics

import numpy as np
from hand_written_steps import Response, clipped_gradient, moved_policy, of_the_group, probing_group

from rlvr.records import Task

TASKS = [Task(id=f"t{i}", prompt=f"What is {i} + 2?", answer="4") for i in range(3)]
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"
RESPONSES = [
    ("It is \\boxed{4}.", 1.0),
    (RIGHT, 1.0),
    ("<think> so </think> \\boxed{4}", 1.0),
    ("so " * 4000 + RIGHT, 1.0),
    ("The answer is 4.", 1.0),
    (WRONG, 0.0),
    ("<think> \\boxed{4} </think> \\boxed{5}", 0.0),
    ("I do not know", 0.0),
    ("", 0.0),
    ("so " * 4000, 0.0),
]


def test_ten_responses(recipe_step):
    """The verdict alone: long responses lose nothing (LitePPO.md has no filter of overlong ones)."""
    group = [Response(text, (1,) * (8192 if len(text) > 1000 else 1)) for text, _ in RESPONSES]
    batch = recipe_step("lite-ppo", TASKS[:1]).score([group])
    assert batch.column("reward").tolist() == [reward for _, reward in RESPONSES]


def by_the_batch(groups):
    """Rewards less the group's mean over the deviation of all rewards."""
    spread = statistics.stdev([reward for rewards in groups for reward in rewards])
    return [(reward - statistics.fmean(rewards)) / (spread + 1e-6) for rewards in groups for reward in rewards]


def test_a_group_with_little_spread_is_not_scaled_up(recipe_step):
    """The paper's case: of eight responses to an easy prompt one is wrong, to a hard one one is right. GRPO makes 2.6
    of them; the deviation of the batch leaves them at twice their distance, and equal groups at 0."""
    rewards = [[1.0] * 7 + [0.0], [0.0] * 7 + [1.0], [1.0] * 4 + [0.0] * 4]
    groups = [[Response(RIGHT if reward else WRONG) for reward in of_task] for of_task in rewards]
    got = recipe_step("lite-ppo", TASKS).score(groups).column("advantage")
    np.testing.assert_allclose(got, by_the_batch(rewards), rtol=1e-9)
    assert -1.8 < got[7] < -1.7
    assert of_the_group(rewards[0], 1e-6, True)[7] < -2.4


def test_gradient(recipe_step):
    """clip 0.2 on both sides, at most 3 times a negative advantage (dual clip), the mean over all tokens, no KL and no
    entropy bonus."""
    logits, old = moved_policy(12)
    step = recipe_step("lite-ppo", TASKS[:2])
    first = [*probing_group(RIGHT, WRONG), Response(WRONG, (1, 2, 3))]
    second = [Response(RIGHT, (1,)), Response(RIGHT, (5, 8, 6)), Response(WRONG, (7,))]
    batch = step.score([first, second])
    rewards = [[float(response.text == RIGHT) for response in group] for group in (first, second)]
    ids = [response.ids for response in (*first, *second)]
    expected = clipped_gradient(by_the_batch(rewards), ids, logits, old, "tokens", cap=3.0)
    np.testing.assert_allclose(step.gradient(batch, logits, old=old), expected, rtol=1e-9, atol=1e-12)
