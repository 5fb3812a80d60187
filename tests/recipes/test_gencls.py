"""GenCLS++: the label's match as reward, whitened over the batch and not by group (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, policy_gradient

from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

LABELS = ["negative", "neutral", "positive"]


def review(number, answer="positive"):
    return Task(id=f"t{number}", prompt=f"Label the review {number}.", answer=answer, info={"labels": LABELS})


RESPONSES = [
    ("positive", True),
    ("Positive", True),
    ("The label is positive.", True),
    ("The plot is weak, which is negative.\nThe acting saves it.\nLabel: positive", True),
    ("**positive**", True),
    ("negative", False),
    ("neutral", False),
    ("positive or neutral", False),
    ("The review is not positive.", False),
    ("", False),
]
RIGHT, WRONG = RESPONSES[0][0], RESPONSES[5][0]


def whitened(rewards, lengths):
    """Every token's reward, minus the mean of all tokens of the batch, over their deviation."""
    tokens = [reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)]
    mean = math.fsum(tokens) / len(tokens)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in tokens) / len(tokens))
    return [(reward - mean) / deviation for reward in rewards]


def test_ten_responses(recipe_step):
    got = recipe_step("gencls", [review(0)]).rewards([text for text, _ in RESPONSES])
    assert got == [float(right) for _, right in RESPONSES]


def test_an_easy_text_is_still_reinforced(recipe_step):
    """The case in which the batch's normalisation differs from the group's: a text that is always labelled right has an
    advantage of +1 beside one that is always wrong. GRPO gives both groups 0."""
    step = recipe_step("gencls", [review(0), review(1)])
    batch = step.score([[Response(RIGHT)] * 4, [Response(WRONG)] * 4])
    np.testing.assert_allclose(batch.column("advantage"), [1.0] * 4 + [-1.0] * 4, rtol=1e-6)


def test_a_hard_text_s_right_answer_gains_no_more_than_an_easy_one_s(recipe_step):
    """One right answer of four and three of four: GRPO would give 1.73 and 0.58, the batch gives both 1."""
    step = recipe_step("gencls", [review(0), review(1)])
    group = [Response(RIGHT), *[Response(WRONG)] * 3]
    batch = step.score([group, [*[Response(RIGHT)] * 3, Response(WRONG)]])
    advantage = batch.column("advantage")
    assert advantage[0] == advantage[4] == pytest.approx(1.0, rel=1e-6)


def test_gradient_of_a_two_token_policy(recipe_step):
    ids = [(1,), (0, 1), (0,), (1, 1, 0), (1,)]
    texts = [RIGHT, WRONG, WRONG, RIGHT, RIGHT]
    step = recipe_step("gencls", [review(0), review(1)])
    responses = [Response(text, own) for text, own in zip(texts, ids, strict=True)]
    batch = step.score([responses[:3], responses[3:]])
    advantages = whitened([float(text == RIGHT) for text in texts], [len(own) for own in ids])
    logits = [0.0, 0.6]
    expected = policy_gradient(advantages, ids, logits, "sequences")
    np.testing.assert_allclose(step.gradient(batch, logits), expected, rtol=1e-6)


def test_reinforcement_comes_after_imitation():
    assert [plan.kind for plan in stage_plans(find_paper("gencls").config)] == ["sft", "grpo"]
