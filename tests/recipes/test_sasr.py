"""SASR: both losses in a step, and the share of the supervised one (the recipe is in part)."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, policy_gradient, score_function

from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

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


def both(logits, share):
    ids = [response.ids for response in GROUP]
    reinforced = policy_gradient(of_the_group([1.0, 0.0, 0.0]), ids, logits, "sequences")
    return reinforced - share * score_function(SHOWN, logits) / len(SHOWN)


def share_of(step, logits):
    """The supervised loss's weight in the recipe's gradient, which is solved for it."""
    rest = step.gradient(step.score([GROUP]), logits) - both(logits, 0.0)
    supervised = both(logits, 1.0) - both(logits, 0.0)
    share = float(rest @ supervised / (supervised @ supervised))
    np.testing.assert_allclose(rest, share * supervised, rtol=1e-6, atol=1e-12)
    return share


def test_gradient_of_a_step_is_the_sum_of_both_losses(step):
    logits = np.random.default_rng(2).normal(size=8)
    np.testing.assert_allclose(step.gradient(step.score([GROUP]), logits), both(logits, 1.0), rtol=1e-9)


def test_the_supervised_share_falls_as_the_gradient_does(step):
    """The paper gives imitation less as its gradient shrinks, and more again where the policy drifts away."""
    logits = np.random.default_rng(3).normal(size=8)
    shares = [share_of(step, logits)]
    for norm in (0.9, 0.7, 0.4, 0.2, 0.1):
        step.stage.observe({"grad_norm": norm})
        shares.append(share_of(step, logits))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.75 * shares[0]
    step.stage.observe({"grad_norm": 3.0})
    assert share_of(step, logits) > shares[-1]


def test_imitation_comes_first():
    assert [plan.kind for plan in stage_plans(find_paper("sasr").config)] == ["sft", "grpo"]


@pytest.mark.xfail(
    strict=True,
    reason="The paper draws one of the two losses for each step, with a probability from the norm of the supervised "
    "gradient alone. The recipe, which is in part, weighs a sum by the norm of the whole gradient: where the "
    "demonstration is known and reinforcement alone has a large gradient, the share of imitation rises.",
)
def test_the_share_follows_the_supervised_gradient_alone(step):
    """The policy writes the demonstration as well as it can, while the rewards' gradient is large."""
    known = np.full(8, -12.0)
    known[[6, 7, 1]] = np.log([2.0, 2.0, 1.0])
    assert np.linalg.norm(both(known, 1.0) - both(known, 0.0)) < 1e-4
    before = share_of(step, known)
    # The norm of a step whose gradient is that of reinforcement alone.
    step.stage.observe({"grad_norm": 3.0})
    assert share_of(step, known) < before
