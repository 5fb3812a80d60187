"""Light-IF: a dense reward for a part of the instructions (the recipe is in part)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, k3_gradient, of_the_group, policy_gradient

from rlvr.records import Task

TASK = Task(
    id="t",
    prompt="Describe the sea in at most 8 words, without a comma, and use the word blue.",
    info={
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence", "length_constraints:number_words"],
        "kwargs": [{}, {"keywords": ["blue"]}, {"relation": "less than", "num_words": 9}],
    },
)
RESPONSES = [
    "<think>\nNo comma, blue, eight words.\n</think>\nThe sea is wide and blue.",
    "<think>\nI must not write a comma.\n</think>\nThe sea, wide and blue.",
    "<think>\nPreview: blue. Check: done.\n</think>\nThe sea is wide.",
    "<think>\nso\n</think>\nThe sea, the wind and the waves go on and on for miles.",
    "<think>\nso\n</think>\nThe blue sea goes on and on for many many miles",
    "<think>\nblue\n</think>\nThe sea, wide.",
    "Blue sea",
    "<think>\nso\n</think>\nA very long answer about a blue sea, with waves, and wind, and sand",
    "<think>\nThe sea is wide and blue.\n</think>\n",
    "<think>\nThe sea is wide and blue",
]


def followed(text):
    """The number of instructions that the text after the reasoning follows, counted here by hand; none in silence."""
    if "<think>" in text and "</think>" not in text:
        return 0
    answer = text.rpartition("</think>")[2].strip()
    if not answer:
        return 0
    words = answer.replace(",", " ").replace(".", " ").split()
    return ("," not in answer) + ("blue" in [word.lower() for word in words]) + (len(words) < 9)


@pytest.fixture
def step(recipe_step):
    return recipe_step("light-if", [TASK])


def test_ten_responses(step):
    counts = [followed(text) for text in RESPONSES]
    assert counts == [3, 2, 2, 0, 2, 1, 3, 1, 0, 0]
    np.testing.assert_allclose(step.rewards(RESPONSES), [count / 3 for count in counts], rtol=0, atol=1e-12)


def test_a_group_in_which_nobody_follows_all_has_a_signal(step):
    """The case for a dense reward: all or nothing gives this group no advantage. More instructions, more advantage."""
    group = [RESPONSES[i] for i in (3, 5, 1)]
    assert [followed(text) for text in group] == [0, 1, 2]
    batch = step.score([[Response(text, (1,)) for text in group]])
    advantage = batch.column("advantage")
    np.testing.assert_allclose(advantage, [-math.sqrt(1.5), 0, math.sqrt(1.5)], rtol=1e-3, atol=1e-12)


def test_gradient_of_a_two_token_policy(step):
    """GRPO of the dense reward over tokens, and the KL with the estimator k3 and weight 0.001."""
    ids = [(1, 0), (1,), (0, 0, 1)]
    group = [Response(RESPONSES[i], own) for i, own in zip((0, 2, 5), ids, strict=True)]
    logits, reference = [0.0, 1.5], [0.5, 0.0]
    reward = policy_gradient(of_the_group([1, 2 / 3, 1 / 3]), ids, logits, "tokens")
    kl = 0.001 * k3_gradient(ids, logits, reference, "tokens")
    got = step.gradient(step.score([group]), logits, reference=reference)
    np.testing.assert_allclose(got, reward + kl, rtol=1e-9)


@pytest.mark.xfail(
    strict=True,
    reason="The authors add 0.05 to 0.2 for each constraint and 1 where all are met (Qihoo360/Light-IF@01e9003 "
    "rl/verl/verl/utils/reward_score/__init__.py: point_score + acc_score); the recipe, which is in part, pays the "
    "last instruction as much as the first.",
)
def test_the_last_instruction_is_worth_most(step):
    none, one, _, all_of_them = step.rewards([RESPONSES[i] for i in (3, 5, 1, 0)])
    assert all_of_them - one > 1.5 * (one - none) + 1
