"""GRPO-lambda: the fifth of a batch's groups with the highest pass rates is paid by length, the others by the verdict.

The share, the penalty with its alpha and the plain reward were read in a write-up of the method (arXiv 2505.18086).
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hand_written_steps import Response, moved_policy, of_the_group, policy_gradient

from rlvr.records import Task

ALPHA = 0.6
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"
LENGTHS = (2, 4, 6, 12)
SOLVED = (0, 1, 3, 2, 1, 4, 2, 0, 3, 1)
"""Right answers of ten groups of four. The fifth with the highest pass rates: the one that is always right, and the
first of the two that tie behind it."""
PENALISED = (2, 5)


def members(right):
    return [(RIGHT if member < right else WRONG, LENGTHS[member]) for member in range(4)]


def by_length(right):
    """1 - alpha sigmoid((L - mean) / std) over the right answers, 0 for wrong ones."""
    used = LENGTHS[:right]
    mean, spread = statistics.fmean(used), statistics.pstdev(used)
    penalised = [1 - ALPHA / (1 + math.exp(-(length - mean) / spread)) for length in used]
    return penalised + [0.0] * (4 - right)


def rewards(groups=SOLVED, penalised=PENALISED):
    return [
        by_length(right) if number in penalised else [1.0] * right + [0.0] * (4 - right)
        for number, right in enumerate(groups)
    ]


def score(recipe_step, solved=SOLVED):
    tasks = [Task(id=f"t{i}", prompt=f"What is {i} + 2?", answer="4") for i in range(len(solved))]
    step = recipe_step("grpo-lambda", tasks)
    groups = [[Response(text, (1 + length % 8,) * length) for text, length in members(right)] for right in solved]
    return step, step.score(groups), [response.ids for group in groups for response in group]


def test_rewards_of_a_batch(recipe_step):
    _, batch, _ = score(recipe_step)
    np.testing.assert_allclose(batch.column("reward"), np.ravel(rewards()), rtol=1e-12)


@pytest.mark.parametrize(("groups", "count"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3), (26, 6)])
def test_a_fifth_of_the_batch_and_no_more_is_penalised_where_all_are_solved(recipe_step, groups, count):
    """What keeps the accuracy from collapsing: length never counts in most groups."""
    _, batch, _ = score(recipe_step, [4] * groups)
    lost = (batch.column("reward").reshape(groups, 4) < 1).any(axis=1)
    assert lost.sum() == count


def test_a_long_right_answer_stays_above_a_wrong_one(recipe_step):
    """At most 0.6 is lost, so that the order of right and wrong stays, and the longest right answer of an easy group
    has the lowest advantage of the right ones."""
    _, batch, _ = score(recipe_step)
    advantage = batch.column("advantage").reshape(10, 4)
    assert advantage[2][0] > advantage[2][1] > advantage[2][2] > 0 > advantage[2][3]
    # The group that is solved four times has an order by length alone.
    assert (np.diff(advantage[5]) < 0).all()
    # Groups that are not penalised do not see the length.
    assert advantage[8][0] == advantage[8][2]


def test_gradient(recipe_step):
    """GRPO's: the group's deviation, the mean over each response."""
    logits, _ = moved_policy(12)
    step, batch, ids = score(recipe_step)
    advantages = [a for of_group in rewards() for a in of_the_group(of_group)]
    # Groups without a difference have none.
    expected = policy_gradient([0.0 if abs(a) < 1e-9 else a for a in advantages], ids, logits, "sequences")
    np.testing.assert_allclose(step.gradient(batch, logits), expected, rtol=1e-9, atol=1e-12)
