"""Scalable IRL as it ships: the gradient of a demonstration, in closed form.

Offline inverse soft Q-learning, equation 14 of Wulfmeier et al. 2024 (arXiv 2409.01369), as read in a summary; lambda,
gamma and a value of 0 after the last token are chosen here.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import score_function, softmax

from rlvr.records import Task

PENALTY, DISCOUNT = 0.1, 1.0
SHOWN = {"abba": (6, 7, 7, 6, 1), "a": (6, 1)}
"""Demonstrations in the lent tokenizer's ids, with their end."""


def by_tokens(demonstrations, logits):
    """The mean over tokens of d / d logits of -log pi + lambda (Q - gamma V')^2: Q is the token's own logit, and V the
    logsumexp, whose gradient are the probabilities."""
    p = softmax(logits)
    value = np.log(np.exp(logits).sum())
    result = np.zeros(len(logits))
    for ids in demonstrations:
        for number, token in enumerate(ids):
            following = number + 1 < len(ids)
            reward = logits[token] - DISCOUNT * value * following
            slope = -DISCOUNT * p * following
            slope[token] += 1
            result += 2 * PENALTY * reward * slope - score_function([token], logits)
    return result / sum(map(len, demonstrations))


@pytest.mark.parametrize("level", [-2.0, 0.0, 3.0])
def test_gradient(recipe_step, level):
    """The level of the logits, which the likelihood leaves free, is held: it moves the reward of the last token."""
    tasks = [Task(id=text, prompt="Spell it.", answer=text, demonstration=text) for text in SHOWN]
    step = recipe_step("scalable-irl", tasks, "sft")
    logits = (level + np.random.default_rng(3).normal(size=8)).tolist()
    expected = by_tokens(SHOWN.values(), logits)
    np.testing.assert_allclose(step.gradient(step.demonstrations(), logits), expected, rtol=1e-6, atol=1e-9)
    # The likelihood's gradient sums to 0 over the tokens.
    assert abs(expected.sum()) > 1e-3


def test_a_likely_token_of_a_low_value_is_worth_more(recipe_step):
    """The implied reward of a token is its logit less the value of what follows: at the values of this policy the term
    pushes the logit of a token with a positive one down, beyond what the likelihood does."""
    step = recipe_step("scalable-irl", [Task(id="a", prompt="Spell it.", answer="a", demonstration="a")], "sft")
    logits = np.full(8, -4.0)
    logits[1] = 2.0
    likelihood = -(score_function([6], logits) + score_function([1], logits)) / 2
    change = step.gradient(step.demonstrations(), logits.tolist()) - likelihood
    # The end token: Q = 2, no value after it. The first: Q = -4 less V = 2.01.
    assert change[1] == pytest.approx(PENALTY * (2 * 2.0 + 2 * 6.0148 * softmax(logits)[1]) / 2, rel=1e-3)
    assert change[6] < 0
