"""Weighted REINFORCE of positive and negative samples (arXiv 2506.01347; TianHongZXY/RLVR-Decomposed@a5d4e7c).

verl/trainer/ppo/core_algos.py, compute_psr_nsr_outcome_advantage with `weighted`: a right response has the advantage
1 times positive_advantage_weight (0.1 in run_qwen2.5-math-7b_psr_nsr.sh), a wrong one 0 minus 1, without a baseline.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import (
    BEFORE,
    ENGINE,
    MOVED,
    Response,
    clipped_gradient,
    entropy_gradient,
    policy_gradient,
    softmax,
)

from advantage_helpers import batch_of
from rlvr import registry
from rlvr.advantages import GroupAdvantage
from rlvr.errors import ConfigError
from rlvr.recipes.psr.signs import Signs
from rlvr.records import Task

TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
RIGHT, WRONG = 0.1, -1.0
ENTROPY = 0.001
"""actor.entropy_coeff of verl/trainer/config/ppo_trainer.yaml, which the script leaves as it is."""
# (text, right)
RESPONSES = [
    ("We add: 2 + 2 = 4. So the final answer is \\boxed{4}.", True),
    ("\\boxed{4}", True),
    ("$$\\boxed{4.0}$$", True),
    ("5? No. \\boxed{4}", True),
    ("so " * 200 + "\\boxed{4}", True),
    ("So the final answer is \\boxed{5}.", False),
    ("\\boxed{}", False),
    ("2 + 2 makes 4", False),
    ("so " * 200, False),
    ("", False),
]


@pytest.fixture
def step(recipe_step):
    return recipe_step("psr", [TASK])


def test_ten_responses(step):
    """One group: whatever the others are, a right response has 0.1 and a wrong one -1."""
    batch = step.score([[Response(text) for text, _ in RESPONSES]])
    np.testing.assert_allclose(batch.column("advantage"), [RIGHT if right else WRONG for _, right in RESPONSES])


def test_a_group_of_one_outcome_learns(recipe_step):
    """GRPO has no gradient in either group. Here the wrong one pushes its token down by ten times the pull of the right
    one on its own: negative reinforcement is what the recipe is about."""
    step = recipe_step("psr", [TASK, Task(id="u", prompt="What is 1 + 3?", answer="4")])
    logits = [0.0, 0.0, 0.0]
    group = [[Response(text, (token,))] * 4 for text, token in ((RESPONSES[0][0], 1), (RESPONSES[5][0], 2))]
    # By descent, so that minus the gradient is the change of the logits.
    up, down = (-step.gradient(step.score(group).select(of), logits) for of in (range(4), range(4, 8)))
    assert up[1] > 0 > down[2]
    np.testing.assert_allclose(down[2] / up[1], WRONG / RIGHT, rtol=1e-9)
    # What the wrong token loses goes to the others in proportion to their probabilities, equal here.
    np.testing.assert_allclose(down, [1 / 3, 1 / 3, -2 / 3], rtol=1e-9)


IDS = [(0, 1, 2, 3), (1,), (0, 1, 2, 3), (2, 1, 2)]
GROUP = [Response(RESPONSES[i][0], ids) for i, ids in zip((0, 3, 5, 7), IDS, strict=True)]
ADVANTAGES = [RIGHT, RIGHT, WRONG, WRONG]


def test_gradient_of_the_first_update(step):
    """-A log pi over all tokens, less 0.001 times the entropy, whatever the engine's log-probs are."""
    got = step.gradient(step.score([GROUP]), MOVED, engine=ENGINE)
    expected = policy_gradient(ADVANTAGES, IDS, MOVED, "tokens") - ENTROPY * entropy_gradient(MOVED)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    assert ENTROPY * np.abs(entropy_gradient(MOVED)).max() > 1e-4


def test_gradient_of_a_later_update(step):
    """The ratio to the policy before the first update is clipped at 0.8 and 1.2, and by no dual clip: the wrong token
    that has become five times as likely is pushed down with all of it."""
    assert softmax(MOVED)[0] > 3 * softmax(BEFORE)[0]
    got = step.gradient(step.score([GROUP]), MOVED, old=BEFORE, engine=ENGINE)
    expected = clipped_gradient(ADVANTAGES, IDS, MOVED, BEFORE, "tokens") - ENTROPY * entropy_gradient(MOVED)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_psr_nsr_and_weighted_reinforce():
    """Zhu et al. 2025 with rewards 0 and 1: PSR trains on right answers only, NSR on wrong ones only."""
    batch = batch_of([1.0, 0.0, 1.0, math.nan])
    base = GroupAdvantage(0.5, 0.5)(batch)
    np.testing.assert_array_equal(base, [1, -1, 1, 0])
    np.testing.assert_array_equal(Signs(negative=0.0)(batch, base), [1, 0, 1, 0])
    np.testing.assert_array_equal(Signs(positive=0.0)(batch, base), [0, -1, 0, 0])
    np.testing.assert_allclose(Signs(positive=0.1)(batch, base), [0.1, -1, 0.1, 0])


def test_both_signs_are_weighted_and_a_weight_is_at_least_0():
    batch = batch_of([1.0, 0.0, 0.5, math.nan])
    advantage = np.asarray([2.0, -1.0, 0.5, 0.0])
    np.testing.assert_array_equal(Signs(0.1, 2.0)(batch, advantage), [0.2, -2, 0.05, 0])
    with pytest.raises(ConfigError, match="at least 0"):
        registry.build("modifier", {"name": "signs", "negative": -1.0})
