"""PAR: the probability that a response is preferred to a reference one, by a reward model.

The formulas are those of github PorUna-byte/PAR, commit b8caf40, trainers/reward_shaper.py
(`calculate_relative_sigmoid`, `shaped_reward`) and trainers/grpo_trainer.py (`compute_advantages`).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group
from scores_by_hand import chat_score

from rlvr.records import Task

TASK = Task(id="t", prompt="Name a river.", answer="The Danube.")
TEXTS = ["The Danube.", "The Rhine, in Germany.", "I do not know.", "", "A river is the Elbe. " * 8]


def shaped(score, reference, length):
    """The reward of the authors, with one reference response."""
    if length > 300:
        score -= 0.01 * (length - 300)
    return 1 / (1 + math.exp(-(score - reference)))


def test_rewards_are_probabilities_against_the_reference(recipe_step, tmp_path):
    step = recipe_step("par", [TASK], models=tmp_path)
    reference = chat_score(tmp_path / "rm", TASK.prompt, TASK.answer)
    scores = [chat_score(tmp_path / "rm", TASK.prompt, text.strip()) for text in TEXTS]
    got = step.rewards(TEXTS)
    np.testing.assert_allclose(got, [shaped(score, reference, 1) for score in scores], atol=1e-5)
    # The reference itself is as good as itself, whatever its score.
    assert got[0] == pytest.approx(0.5, abs=1e-6)
    assert len({round(reward, 4) for reward in got}) == len(TEXTS)


def test_a_long_response_has_less_and_advantages_are_those_of_the_authors(recipe_step, tmp_path):
    step = recipe_step("par", [TASK], models=tmp_path)
    reference = chat_score(tmp_path / "rm", TASK.prompt, TASK.answer)
    lengths = (10, 300, 400, 512)
    batch = step.score([[Response(TEXTS[0], (1,) * length) for length in lengths]])
    expected = [shaped(reference, reference, length) for length in lengths]
    np.testing.assert_allclose(batch.column("reward"), expected, atol=1e-6)
    assert expected[0] == expected[1] == 0.5 and expected[3] == pytest.approx(1 / (1 + math.exp(2.12)))
    np.testing.assert_allclose(batch.column("advantage"), of_the_group(expected, 1e-8, unbiased=True), atol=1e-4)
