"""The three rewards of the practical two-stage recipe, on ten responses in the form that the named model writes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Verdict
from rlvr.rewards import build_terms, score

RESPONSES = [
    # (text, right)
    ("<think>2 and 2 make \\boxed{4}</think>\n\\boxed{4}", True),
    ("<think>2 and 2 make 4</think>\nThe answer is \\boxed{4}.", True),
    ("<think>\n\\boxed{4} or so.\n</think>", True),
    ("2 and 2 make \\boxed{4}", True),
    ("<think>it is \\boxed{5}</think>\n\\boxed{5}", False),
    ("<think>it is 5</think> <answer>5</answer>", False),
    ("<think>" + "hm " * 4000 + "\\boxed{4}</think>", True),
    ("<think>" + "hm " * 12000 + "\\boxed{4}</think>", True),
    ("<think>" + "hm " * 12000 + "\\boxed{5}</think>", False),
    ("<think>" + "hm " * 400, False),
]
BOXED = [1, 0, 1, 0, 1, 0, 1, 1, 1, 0]


def cosine(length, right):
    """finetune/grpo_rewards.py with the arguments of experiments/train_second_stage.py."""
    short, long = (1.0, 0.1) if right else (-1.0, -0.1)
    return long + 0.5 * (short - long) * (1 + math.cos(min(1.0, length / 30000) * math.pi))


def length(own, lengths, right):
    value = 0.5 - (own - min(lengths)) / (max(lengths) - min(lengths))
    return value if right else min(0.0, value)


@pytest.fixture
def rewards(make_rollout):
    """`rewards(responses)`: the columns of one group's rewards under the recipe."""

    def make(responses):
        rollouts = []
        for member, (text, right) in enumerate(responses):
            rollout = make_rollout([9, 1], prompt=1, member=member, text=text)
            rollout.verdicts["math"] = Verdict.from_score(float(right))
            rollouts.append(rollout)
        batch = Batch(rollouts)
        score(batch, build_terms(find_paper("practical-two-stage-recipe").config.rewards))
        return batch.columns

    return make


def test_ten_responses(rewards):
    got = rewards(RESPONSES)
    lengths = [len(text) for text, _ in RESPONSES]
    np.testing.assert_array_equal(got["reward/boxed_in_thinking"], BOXED)
    expected = [
        boxed + cosine(own, right) + length(own, lengths, right)
        for boxed, own, (_, right) in zip(BOXED, lengths, RESPONSES, strict=True)
    ]
    np.testing.assert_allclose(got["reward"], expected, rtol=0, atol=1e-12)
    # A right answer beyond 30,000 characters has the value of a long one and no penalty of its own.
    assert got["reward/cosine_characters"][7] == pytest.approx(0.1)
    assert got["reward/cosine_characters"][8] == pytest.approx(-0.1)


def test_every_reward_differs_within_a_group_of_the_form_that_the_model_writes(rewards):
    """An R1 distillation writes <think> and never <answer>: a form that it never writes would be a constant."""
    got = rewards(RESPONSES[:4])
    for name in ("boxed_in_thinking", "cosine_characters", "brief_characters"):
        assert np.ptp(got[f"reward/{name}"]) > 0, name


def test_a_wrong_answer_gains_nothing_by_being_short(rewards):
    short, middle, long = rewards([("x", False), ("x" * 50, True), ("x" * 101, False)])["reward/brief_characters"]
    assert (short, middle, long) == pytest.approx((0.0, 0.01, -0.5))
    assert list(rewards([("same", False), ("long", True)])["reward/brief_characters"]) == [0, 0]


def test_the_pattern_is_the_authors(rewards):
    pattern = re.compile(r"^.*?oxed{(.*?)}.*?</think>.*?$", re.DOTALL)
    texts = [text for text, _ in RESPONSES] + ["\\boxed{} </think>", "\\boxed{4 </think> }", "</think>", ""]
    got = rewards([(text, False) for text in texts])["reward/boxed_in_thinking"]
    assert [bool(value) for value in got] == [pattern.match(text) is not None for text in texts]
