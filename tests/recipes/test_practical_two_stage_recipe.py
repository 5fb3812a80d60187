"""The three rewards of the practical two-stage recipe, on ten responses in the form that the named model writes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, Response, clipped_gradient, k3_gradient, of_the_group

from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task, Verdict
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
AFTER_THE_THINKING = [True, True, False, True, False, False, False, False, False, False]
"""What the library's verifier finds right: an answer that stands in the thinking alone is none for it."""


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


@pytest.mark.parametrize("moved", [False, True])
def test_gradient_of_a_step(recipe_step, moved):
    """finetune/openr1_mod/faster_grpo_trainer.py: the group's advantages with torch's deviation and 1e-4, a clip of 0.2
    on both sides, KL 0.04 by exp(d) - d - 1, the mean over tokens."""
    ids = [(0, 1, 2, 3), (1,), (2, 1), (0, 0, 3), (2, 3), (0,), (2,), (1, 1), (3,), (2, 0, 3, 1)]
    lengths = [len(text) for text, _ in RESPONSES]
    rewards = [
        boxed + cosine(own, right) + length(own, lengths, right)
        for boxed, own, right in zip(BOXED, lengths, AFTER_THE_THINKING, strict=True)
    ]
    step = recipe_step("practical-two-stage-recipe", [Task(id="t", prompt="What is 2 + 2?", answer="4")])
    batch = step.score([[Response(text, own) for (text, _), own in zip(RESPONSES, ids, strict=True)]])
    np.testing.assert_allclose(batch.column("reward"), rewards, rtol=0, atol=1e-9)
    # One update a batch has no policy before it but its own; the clip is there for a second one.
    got = step.gradient(batch, MOVED, old=BEFORE if moved else None, reference=ENGINE)
    advantages = of_the_group(rewards, 1e-4, unbiased=True)
    policy = clipped_gradient(advantages, ids, MOVED, BEFORE if moved else MOVED, "tokens")
    np.testing.assert_allclose(got, policy + 0.04 * k3_gradient(ids, MOVED, ENGINE, "tokens"), rtol=1e-6)
    if not moved:
        np.testing.assert_array_equal(step.gradient(batch, MOVED, reference=ENGINE, engine=ENGINE), got)


def test_the_engine_samples_as_the_authors_do(recipe_step):
    """sampling_params_dict of experiments/train_second_stage.py."""
    step = recipe_step("practical-two-stage-recipe", [Task(id="t", prompt="What is 2 + 2?", answer="4")])
    sampling = step.stage.rollout_context_at(0).sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k) == (1.0, 0.9, 0.05, 0)
