"""e1: a right answer is rewarded within its effort times the mean length of its prompt's responses.

The rule was read in a summary of the paper (sciencestack.ai/paper/2510.27042); there is no code of the authors.
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hand_written_steps import Response, moved_policy, of_the_group, policy_gradient

from rlvr.records import Task

RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"


def tasks(*efforts):
    return [
        Task(id=f"t{i}", prompt=f"What is 2 + 2? Use {e:g} times.", answer="4", info={"effort": e})
        for i, e in enumerate(efforts)
    ]


# (text, tokens): right answers of 2 to 16 tokens, wrong ones of 1 to 20; the mean of all is 10.
TEN = [(RIGHT, n) for n in (2, 5, 8, 10, 16)] + [(WRONG, n) for n in (1, 12, 12, 14, 20)]


def rewards(group, effort):
    """1 for a right answer of at most effort x the mean length of all."""
    limit = effort * statistics.fmean(length for _, length in group)
    return [float(text == RIGHT and length <= limit) for text, length in group]


def responses(group):
    return [Response(text, (1 + i % 8,) * length) for i, (text, length) in enumerate(group)]


@pytest.mark.parametrize(
    ("effort", "count"), [(0.19, 0), (0.2, 1), (0.5, 2), (0.79, 2), (0.8, 3), (1.0, 4), (1.59, 4), (1.6, 5), (9.0, 5)]
)
def test_ten_responses(recipe_step, effort, count):
    """Wrong answers count in the mean, and short ones earn nothing."""
    batch = recipe_step("e1", tasks(effort)).score([responses(TEN)])
    assert batch.column("reward").tolist() == rewards(TEN, effort)
    assert sum(rewards(TEN, effort)) == count


def test_a_low_effort_prefers_the_short_answer_and_a_high_one_does_not(recipe_step):
    """The same four responses under two efforts, the mean length being 6."""
    group = [(RIGHT, 2), (RIGHT, 10), (WRONG, 2), (WRONG, 10)]
    step = recipe_step("e1", tasks(0.5, 2.0))
    low, high = np.split(step.score([responses(group)] * 2).column("advantage"), 2)
    assert low[0] > 0 > low[1]
    assert low[1] == low[2] == low[3]
    assert high[0] == high[1] > 0 > high[2]


def test_gradient(recipe_step):
    """GRPO's, of both prompts."""
    logits, _ = moved_policy(12)
    step = recipe_step("e1", tasks(0.5, 2.0))
    batch = step.score([responses(TEN)] * 2)
    advantages = of_the_group(rewards(TEN, 0.5)) + of_the_group(rewards(TEN, 2.0))
    ids = [response.ids for response in responses(TEN)] * 2
    expected = policy_gradient(advantages, ids, logits, "sequences")
    np.testing.assert_allclose(step.gradient(batch, logits), expected, rtol=1e-9, atol=1e-12)
