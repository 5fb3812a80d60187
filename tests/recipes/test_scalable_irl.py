"""Scalable inverse RL: imitation by offline inverse soft Q-learning (arXiv 2409.01369, equation 14).

The mean over the demonstrations' tokens of lambda (V + log pi - gamma V')^2 - log pi: V + log pi is the token's own
logit, V' the logsumexp of the logits at the next token, 0 after the last. lambda 0.1 and gamma 1 are chosen here.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import score_function, softmax

from rlvr.records import Task

LAMBDA, GAMMA = 0.1, 1.0
LETTERS = {"a": 6, "b": 7}
END = 1
"""Token ids of the lent tokenizer."""
DEMONSTRATIONS = ["ab", "bbba", "a"]


def ids_of(text):
    return [*(LETTERS[letter] for letter in text), END]


@pytest.fixture
def step(recipe_step):
    tasks = [Task(id=str(n), prompt="?", answer="1", demonstration=text) for n, text in enumerate(DEMONSTRATIONS)]
    return recipe_step("scalable-irl", tasks, "sft")


def gradient(logits, texts, penalty=LAMBDA):
    """Of a policy with one logit for each token, so that V is the same everywhere."""
    logits = np.asarray(logits)
    p = softmax(logits)
    value = np.log(np.exp(logits).sum())
    result, tokens = np.zeros(len(logits)), 0
    for ids in map(ids_of, texts):
        for place, token in enumerate(ids):
            last = place + 1 == len(ids)
            implied = logits[token] - (0.0 if last else GAMMA * value)
            slope = np.eye(len(logits))[token] - (0.0 if last else GAMMA * p)
            result += 2 * penalty * implied * slope - score_function([token], logits)
            tokens += 1
    return result / tokens


@pytest.mark.parametrize("seed", range(3))
def test_gradient(step, seed):
    logits = np.random.default_rng(seed).normal(0, 1, 8)
    got = step.gradient(step.demonstrations(), logits.tolist())
    np.testing.assert_allclose(got, gradient(logits, DEMONSTRATIONS), rtol=1e-9)
    plain = gradient(logits, DEMONSTRATIONS, penalty=0.0)
    assert np.linalg.norm(got - plain) > 0.05 * np.linalg.norm(plain)


def test_the_implied_reward_keeps_the_policy_from_certainty(recipe_step):
    """Where every demonstration is one token, the likelihood goes to certainty without end. The reward that a certain
    policy implies for it is its logit, which the penalty draws to 0: beyond some logit the gradient turns round."""
    step = recipe_step("scalable-irl", [Task(id="t", prompt="?", answer="1", demonstration="a")], "sft")
    likely = np.zeros(8)
    slopes = []
    for logit in (1.0, 3.0, 9.0):
        likely[LETTERS["a"]] = likely[END] = logit
        slopes.append(float(step.gradient(step.demonstrations(), likely.tolist())[END]))
    assert slopes[0] < 0 < slopes[2]
    assert slopes == sorted(slopes)


def test_the_level_of_the_logits_is_learned_too(step):
    """The likelihood is the same for logits that differ by a constant; Q is not."""
    logits = np.random.default_rng(5).normal(0, 1, 8)
    higher = step.gradient(step.demonstrations(), (logits + 3.0).tolist())
    np.testing.assert_allclose(higher, gradient(logits + 3.0, DEMONSTRATIONS), rtol=1e-9)
    assert higher.sum() > 0.1
