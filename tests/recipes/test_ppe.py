"""Prior prompt engineering: the answer and the prior's own pair of tags are paid alike (arXiv 2505.14157)."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, plan_of, policy_gradient

from rlvr.data import Template
from rlvr.records import Task

TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
# (text, right): responses after the null-example prior.
RESPONSES = [
    ("<examples>1 + 1 = 2, 2 + 3 = 5</examples>\n<answer>2 + 2 = \\boxed{4}</answer>", True),
    ("<examples>\n3 + 3 = 6\n</examples>\n\n<answer>\n\\boxed{4}\n</answer>", True),
    ("<examples>1 + 1 = 2</examples><answer>\\boxed{5}</answer>", False),
    ("<examples>1 + 1 = 2</examples> The answer is \\boxed{4}.", True),
    ("The answer is \\boxed{4}.", True),
    ("<think>2 + 2</think><answer>\\boxed{4}</answer>", True),
    ("<examples>a</examples><examples>b</examples><answer>\\boxed{4}</answer>", True),
    ("<answer>\\boxed{4}</answer><examples>1 + 1 = 2</examples>", True),
    ("<examples>1 + 1 = 2", False),
    ("", False),
]


def formatted(text):
    """Exactly one pair of each of the expected tags, one after the other, and nothing around."""
    tags = ("<examples>", "</examples>", "<answer>", "</answer>")
    once = all(text.count(tag) == 1 for tag in tags)
    return once and re.fullmatch(r"\s*<examples>.+</examples>\s*<answer>.+</answer>\s*", text, re.DOTALL) is not None


@pytest.fixture
def step(recipe_step):
    return recipe_step("ppe", [TASK])


def test_ten_responses(step):
    """The paper's two halves of 0.5, which the recipe has as 1 and 1: the same up to a factor that GRPO divides out."""
    got = step.rewards([text for text, _ in RESPONSES])
    expected = [0.5 * right + 0.5 * formatted(text) for text, right in RESPONSES]
    assert [reward / 2 for reward in got] == expected
    assert set(expected) == {0.0, 0.5, 1.0}


def test_the_format_is_the_prior_s_own_and_the_prompt_asks_for_it(step):
    """Another prior's tags are no format here, and the system message names each tag that is paid for."""
    for other in ("think", "plan", "code", "knowledge"):
        text = f"<{other}>so</{other}><answer>\\boxed{{4}}</answer>"
        assert step.rewards([text]) == step.rewards(["The answer is \\boxed{4}."])
    system, user = Template.parse(plan_of("ppe").config.data.template).apply("What is 2 + 2?")
    assert system["role"] == "system" and user["content"] == "What is 2 + 2?"
    for tag in ("<examples>", "</examples>", "<answer>", "</answer>"):
        assert tag in system["content"]


def test_a_group_that_is_always_wrong_learns_the_form(step):
    """With the reward of the answer alone this group would have no gradient. Standardised halves: +1 and -1."""
    group = [Response(RESPONSES[2][0], (1,)), Response("\\boxed{5}", (0,))]
    batch = step.score([group])
    np.testing.assert_allclose(batch.column("advantage"), [1, -1], rtol=1e-3)
    assert step.gradient(batch, [0.0, 0.0])[1] < 0


def test_gradient_of_a_two_token_policy(step):
    ids = [(1, 1, 0), (1,), (0, 1), (0,)]
    chosen = [RESPONSES[i] for i in (0, 4, 2, 8)]
    batch = step.score([[Response(text, own) for (text, _), own in zip(chosen, ids, strict=True)]])
    advantages = of_the_group([right + formatted(text) for text, right in chosen])
    logits = [0.0, -0.8]
    expected = policy_gradient(advantages, ids, logits, "sequences")
    np.testing.assert_allclose(step.gradient(batch, logits), expected, rtol=1e-9)
