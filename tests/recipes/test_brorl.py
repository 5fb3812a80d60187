"""BroRL: in a group as wide as the recipe's every right token gains in one update (arXiv 2510.01180)."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import PROMPT, Response, of_the_group, plan_of, policy_gradient, softmax

from rlvr.records import Task

TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
RIGHT = list(range(1, 11))
WRONG = list(range(11, 71))
LOGITS = [-30.0] + [np.log(0.04)] * len(RIGHT) + [np.log(0.01)] * len(WRONG)
"""Ten right tokens of probability 0.04 and sixty wrong ones of 0.01: a right token that is not sampled loses, because
the right mass that is sampled outweighs the wrong one."""


def responses(ids):
    return [Response("\\boxed{4}" if token in RIGHT else "\\boxed{5}", (int(token),)) for token in ids]


def sampled(size, seed):
    return np.random.default_rng(seed).choice(len(LOGITS), size=size, p=softmax(LOGITS))


@pytest.fixture
def step(recipe_step):
    return recipe_step("brorl", [TASK])


def gains(step, ids):
    """The change of each right token's probability in one small step down the recipe's gradient."""
    batch = step.score([responses(ids)])
    moved = np.asarray(LOGITS) - 1e-3 * step.gradient(batch, LOGITS)
    return (softmax(moved) - softmax(LOGITS))[RIGHT]


def test_every_right_token_gains_at_the_shipped_width(step):
    size = plan_of("brorl").config.rollout.group_size
    for seed in range(8):
        assert (gains(step, sampled(size, seed)) > 0).all()


def test_right_tokens_that_a_narrow_group_misses_lose(step):
    """At the width of GRPO's usual group the same update takes probability from right tokens: the unsampled term."""
    seen = 0
    for seed in range(8):
        ids = sampled(8, seed)
        if 0 < sum(token in RIGHT for token in ids) < 8:
            change = dict(zip(RIGHT, gains(step, ids), strict=True))
            missed = [token for token in RIGHT if token not in ids]
            assert missed
            assert min(change[token] for token in missed) < 0
            seen += 1
    assert seen >= 4


def test_the_gradient_equals_a_loop(step):
    ids = sampled(512, 0)
    got = step.gradient(step.score([responses(ids)]), LOGITS)
    advantages = of_the_group([float(token in RIGHT) for token in ids])
    np.testing.assert_allclose(
        got, policy_gradient(advantages, [[token] for token in ids], LOGITS, "tokens"), rtol=1e-9, atol=1e-12
    )
    # The advantages sum to 0, so that only sampled tokens' logits move: the others change by the normaliser alone.
    unsampled = [token for token in range(len(LOGITS)) if token not in ids]
    assert unsampled == [PROMPT]
    np.testing.assert_allclose(got[unsampled], 0, atol=1e-12)


def test_a_token_of_a_long_response_weighs_as_much_as_one_of_a_short_one(step):
    group = [Response("\\boxed{4}", (1, 2, 3)), Response("\\boxed{5}", (11,))]
    got = step.gradient(step.score([group]), LOGITS)
    expected = policy_gradient(of_the_group([1, 0]), [(1, 2, 3), (11,)], LOGITS, "tokens")
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_groups_without_a_difference_are_left_out(step, recipe_step):
    tasks = [TASK, Task(id="u", prompt="What is 1 + 3?", answer="4"), Task(id="v", prompt="What is 4?", answer="4")]
    batch = recipe_step("brorl", tasks).score([responses([1, 2]), responses([1, 11]), responses([11, 12])])
    assert {rollout.task.id for rollout in batch.rollouts} == {"u"}


def test_the_upper_clip_is_wider(step):
    """Of two tokens of probability 1/2, one right: after it rose by a factor of 1.25 it still has a gradient, after 1.3
    it has none; a fall of the wrong one stops to be rewarded at 0.8."""
    batch = step.score([[Response("\\boxed{4}", (0,)), Response("\\boxed{5}", (1,))]])

    def gradient(p):
        return step.gradient(batch, [np.log(p / (1 - p)), 0.0], old=[0.0, 0.0])

    # d rho / d logit = rho (1 - p); the wrong one's ratio is below 0.8 and gives nothing.
    (advantage, _) = of_the_group([1, 0])
    assert gradient(0.625)[0] == pytest.approx(-advantage * 1.25 * 0.375 / 2, rel=1e-9)
    assert gradient(0.65)[0] == 0
