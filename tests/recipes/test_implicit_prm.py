"""Implicit PRM: a reward model whose score is the log-ratio to its own start (PRIME-RL/ImplicitPRM@c044175).

train/openrlhf/trainer/ce_trainer.py: cross-entropy of sigmoid(beta (log pi - log pi_ref)) with the label, log-probs
summed over the response, the mean over responses; train/tasks/run_ce.sh: beta 0.05.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import score_function, softmax

from rlvr.records import Task

BETA = 0.05
LETTERS = {"a": 6, "b": 7}
END = 1
"""Token ids of the lent tokenizer."""
ROWS = [("ab", 1), ("bbba", 0), ("a", 0), ("bb", 1)]


def ids_of(text):
    return [*(LETTERS[letter] for letter in text), END]


@pytest.fixture
def step(recipe_step):
    tasks = [
        Task(id=str(n), prompt="?", demonstration=text, info={"label": label}) for n, (text, label) in enumerate(ROWS)
    ]
    return recipe_step("implicit-prm", tasks, "sft")


def gradient(rows, logits, reference):
    ratio = np.log(softmax(logits)) - np.log(softmax(reference))
    result = np.zeros(len(logits))
    for text, label in rows:
        ids = ids_of(text)
        predicted = 1 / (1 + math.exp(-BETA * sum(ratio[ids])))
        result += (predicted - label) * BETA * score_function(ids, logits) / len(rows)
    return result


@pytest.mark.parametrize("seed", range(3))
def test_gradient(step, seed):
    rng = np.random.default_rng(seed)
    logits, reference = rng.normal(0, 3, 8), rng.normal(0, 3, 8)
    got = step.gradient(step.demonstrations(), logits.tolist(), reference=reference.tolist())
    np.testing.assert_allclose(got, gradient(ROWS, logits, reference), rtol=1e-6)


def test_the_first_step_is_a_half_for_each_response(step):
    """The model is its own reference at first: every response is predicted by 1/2, right ones gain and wrong ones lose
    alike, whatever their lengths."""
    logits = np.random.default_rng(9).normal(0, 1, 8)
    got = step.gradient(step.demonstrations(), logits.tolist(), reference=logits.tolist())
    signs = [1 if label else -1 for _, label in ROWS]
    pulls = [sign * score_function(ids_of(text), logits) for sign, (text, _) in zip(signs, ROWS, strict=True)]
    np.testing.assert_allclose(got, -BETA / 2 * sum(pulls) / len(ROWS), rtol=1e-6)


def test_the_rates_are_those_of_the_authors(step):
    """train/openrlhf/cli/train_ce.py: 3 % of the steps to warm up, then a cosine to a tenth; lr 5e-7 in run_ce.sh."""
    stage = step.stage
    warm_up = math.ceil(0.03 * stage.steps)
    for number in range(0, stage.steps, 13):
        if number < warm_up:
            # Their first step has rate 0, ours the rate of their second.
            expected = (number + 1) / warm_up
        else:
            done = (number - warm_up) / (stage.steps - warm_up)
            expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        assert stage.learning_rate(number) == pytest.approx(5e-7 * expected)
