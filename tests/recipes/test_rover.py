"""ROVER: the log-ratio is fitted to the value under a random policy (arXiv 2509.24981; tinnerhrhe/ROVER@b0fa587).

Math/verl/workers/actor/dp_actor.py: q_values = rover_t (log_prob - old_log_prob), target = advantage +
next_q_scale_factor rover_t (current_q - old_logits) of the next token, both factors 1 in
Math/verl/trainer/config/actor/dp_actor.yaml, current_q the mean over the vocabulary of log pi; core_algos.py,
compute_rover_loss: the mean over tokens of (q_values - sg[target])^2.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, Response, of_the_group, plan_of, score_function, softmax

from rlvr.data import Template
from rlvr.records import Task

TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
RIGHT, WRONG = "2 + 2 = 4. \\boxed{4}", "2 + 2 = 5. \\boxed{5}"
IDS = [(0, 1, 2, 3), (1,), (0, 2), (2, 1, 2), (3,)]
TEXTS = [RIGHT, WRONG, WRONG, RIGHT, WRONG]
GROUP = [Response(text, ids) for text, ids in zip(TEXTS, IDS, strict=True)]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0]
UPDATES = 4
"""train_batch_size 128 over ppo_mini_batch_size 32 of rover_qwen3_8b.sh."""


@pytest.fixture
def step(recipe_step):
    return recipe_step("rover", [TASK])


def advantages(rewards):
    """core_algos.py, compute_grpo_outcome_advantage: torch.std and 1e-6."""
    return of_the_group(rewards, 1e-6, unbiased=True)


def gradient(of_responses, responses, now, before):
    """The gradient of the loss above, whose target is a constant."""
    change = np.log(softmax(now)) - np.log(softmax(before))
    result = np.zeros(len(now))
    for advantage, ids in zip(of_responses, responses, strict=True):
        for place, token in enumerate(ids):
            following = change.mean() if place + 1 < len(ids) else 0.0
            result += 2 * (change[token] - advantage - following) * score_function([token], now)
    return result / sum(map(len, responses))


def test_gradient_of_a_moved_policy(step):
    """The value of the next token is that of all of its alternatives, likely or not: the mean log-ratio of the four
    tokens. The engine's log-probs say nothing."""
    got = step.gradient(step.score([GROUP]), MOVED, old=BEFORE, engine=ENGINE)
    expected = gradient(advantages(REWARDS), IDS, MOVED, BEFORE)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    change = np.log(softmax(MOVED)) - np.log(softmax(BEFORE))
    assert abs(change.mean()) > 0.05


def test_the_first_update_is_twice_reinforce(step):
    got = step.gradient(step.score([GROUP]), MOVED, engine=ENGINE)
    tokens = sum(map(len, IDS))
    pulls = [a * score_function(ids, MOVED) for a, ids in zip(advantages(REWARDS), IDS, strict=True)]
    np.testing.assert_allclose(got, -2 * sum(pulls) / tokens, rtol=1e-9)


def test_the_last_token_alone_has_no_next_value(step):
    """Two responses of one token each: the fit is of the log-ratio to the advantage, so that it is perfect for a policy
    which is the old one times exp(advantage), if that is a distribution."""
    high, low = advantages([1.0, 0.0])
    # p e^high + q e^low + rest = 1 with p + q + rest = 1.
    p = 0.1
    q = p * (np.exp(high) - 1) / (1 - np.exp(low))
    before = np.log([p, q, 1 - p - q])
    now = before + np.asarray([high, low, 0.0])
    assert np.exp(now).sum() == pytest.approx(1)
    batch = step.score([[Response(RIGHT, (0,)), Response(WRONG, (1,))]])
    np.testing.assert_allclose(step.gradient(batch, now, old=before), 0, atol=1e-12)
    assert np.abs(step.gradient(batch, before.tolist(), old=before)).max() > 0.1


def test_the_shipped_updates_let_the_value_act(recipe_step):
    """With one update for each batch every log-ratio is 0, and REINFORCE is all that is left."""
    tasks = [Task(id=str(n), prompt="What is 2 + 2?", answer="4") for n in range(UPDATES)]
    groups = [GROUP[n:] + GROUP[:n] for n in range(UPDATES)]
    got = recipe_step("rover", tasks).after_the_updates(groups, BEFORE, 0.5)
    expected = np.asarray(BEFORE)
    for n in range(UPDATES):
        rewards, ids = REWARDS[n:] + REWARDS[:n], IDS[n:] + IDS[:n]
        expected = expected - 0.5 * gradient(advantages(rewards), ids, expected, BEFORE)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_the_prompt_is_the_authors():
    """Math/data/aime.parquet, made like the training file."""
    template = Template.parse(plan_of("rover").config.data.template)
    asks = "Let's think step by step and output the final answer within \\boxed{}."
    assert (template.system, template.user) == (None, "{prompt} " + asks)


def test_the_engine_samples_at_the_authors_temperature(step):
    """rollout.temperature of the script."""
    assert step.stage.rollout_context_at(0).sampling.temperature == 0.6
