"""SASR: one of the two losses in each step, drawn by the norm of the supervised gradient (the recipe is in part)."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, policy_gradient, score_function

from rlvr.recipes.papers import find_paper
from rlvr.records import Task
from rlvr.rollout import StepRollouts
from rlvr.stages.grpo.demonstrations import demonstration

TASK = Task(
    id="t", prompt="Two and two apples are how many?", answer="2 + 2 = <<2+2=4>>4\n#### 4", demonstration="abba"
)
SHOWN = [6, 7, 7, 6, 1]
"""The demonstration in the lent tokenizer's ids, with its end."""
# (text, right): the form of GSM8K's demonstrations, which the warm-up imitates, and boxes.
RESPONSES = [
    ("2 + 2 = <<2+2=4>>4\n#### 4", True),
    ("There are 2 + 2 = 4 apples.\n#### 4", True),
    ("#### 4.0", True),
    ("2 + 2 = 4, so the answer is \\boxed{4}.", True),
    ("The answer is 4.", True),
    ("2 + 2 = <<2+2=5>>5\n#### 5", False),
    ("2 + 2 = 4\n#### 44", False),
    ("#### four or five", False),
    ("There are some apples.", False),
    ("", False),
]
GROUP = [Response(RESPONSES[0][0], (2, 3)), Response(RESPONSES[5][0], (3,)), Response(RESPONSES[8][0], (3, 3, 2))]


@pytest.fixture
def step(recipe_step):
    return recipe_step("sasr", [TASK])


def test_ten_responses(step):
    assert step.rewards([text for text, _ in RESPONSES]) == [float(right) for _, right in RESPONSES]


def test_a_supervised_step_learns_the_demonstration_alone(step):
    logits = np.random.default_rng(2).normal(size=8)
    expected = -score_function(SHOWN, logits) / len(SHOWN)
    np.testing.assert_allclose(step.gradient(step.demonstrations(), logits), expected, rtol=1e-9)


def test_another_step_is_of_reinforcement_alone(step):
    logits = np.random.default_rng(2).normal(size=8)
    ids = [response.ids for response in GROUP]
    expected = policy_gradient(of_the_group([1.0, 0.0, 0.0]), ids, logits, "sequences")
    np.testing.assert_allclose(step.gradient(step.score([GROUP]), logits), expected, rtol=1e-9, atol=1e-12)


def observed(step, number, norm):
    """Train a supervised step whose gradient has this norm."""
    step.stage.score(StepRollouts([demonstration(TASK, step.stage.context, "0")], step=number))
    step.stage.observe({"grad_norm": norm})


def chance(step, number):
    return step.stage._supervision.probability(number)


def test_the_probability_is_of_the_last_supervised_norm_and_that_of_the_warm_up(step):
    warmup = find_paper("sasr").config.algorithm.supervised_steps.warmup
    gamma = find_paper("sasr").config.algorithm.supervised_steps.gamma
    for number in range(warmup):
        assert chance(step, number) == 1
        observed(step, number, 5.0 - 3.0 * number / (warmup - 1))
    # The last norm of the warm-up is 2, and no other supervised step was made yet.
    assert chance(step, warmup) == pytest.approx(2 / (2 + gamma * 2))
    probabilities = []
    for number, norm in enumerate((1.5, 1.0, 0.5, 0.1), start=warmup):
        observed(step, number, norm)
        probabilities.append(chance(step, number + 1))
        assert probabilities[-1] == pytest.approx(norm / (norm + gamma * 2))
    assert probabilities == sorted(probabilities, reverse=True)


def test_the_share_follows_the_supervised_gradient_alone(step):
    """A large gradient of reinforcement, where the demonstration is known, makes imitation no more likely."""
    warmup = find_paper("sasr").config.algorithm.supervised_steps.warmup
    for number in range(warmup):
        observed(step, number, 2.0)
    observed(step, warmup, 1e-4)
    before = chance(step, warmup + 1)
    assert before < 1e-3
    step.score([GROUP])
    step.stage.observe({"grad_norm": 30.0})
    assert chance(step, warmup + 1) == before


def test_steps_are_drawn_with_that_probability(step):
    warmup = find_paper("sasr").config.algorithm.supervised_steps.warmup
    assert all(step.stage._supervision.drawn(number) for number in range(warmup))
    observed(step, warmup - 1, 3.0)
    observed(step, warmup, 1.0)
    drawn = [step.stage._supervision.drawn(number) for number in range(warmup, warmup + 4000)]
    # A quarter, with a standard deviation of 0.007.
    assert 0.22 < np.mean(drawn) < 0.28
