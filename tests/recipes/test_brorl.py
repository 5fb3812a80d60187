"""BroRL: in a group as wide as the recipe's every right token gains in one update (arXiv 2510.01180).

The update is that of ProRL v2 (NVIDIA-NeMo/RL, commit 7ea279a, examples/configs/prorlv2.v2.yaml and
nemo_rl/algorithms/advantage_estimator.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import PROMPT, Response, plan_of, policy_gradient, score_function, softmax

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


def whitened(rewards, lengths):
    """The rewards of one group less their mean, then to mean 0 and variance 1 over all tokens."""
    centred = np.asarray(rewards, dtype=np.float64) - np.mean(rewards)
    each = np.repeat(centred, lengths)
    return ((centred - each.mean()) / each.std()).tolist()


def gains(step, ids):
    """The change of each right token's probability in one small step down the recipe's gradient."""
    batch = step.score([responses(ids)])
    moved = np.asarray(LOGITS) - 1e-3 * step.gradient(batch, LOGITS, reference=LOGITS)
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
    got = step.gradient(step.score([responses(ids)]), LOGITS, reference=LOGITS)
    advantages = whitened([float(token in RIGHT) for token in ids], [1] * len(ids))
    np.testing.assert_allclose(
        got, policy_gradient(advantages, [[token] for token in ids], LOGITS, "tokens"), rtol=1e-6, atol=1e-12
    )
    # The advantages sum to 0, so that only sampled tokens' logits move: the others change by the normaliser alone.
    unsampled = [token for token in range(len(LOGITS)) if token not in ids]
    assert unsampled == [PROMPT]
    np.testing.assert_allclose(got[unsampled], 0, atol=1e-12)


def test_a_token_of_a_long_response_weighs_as_much_as_one_of_a_short_one(step):
    group = [Response("\\boxed{4}", (1, 2, 3)), Response("\\boxed{5}", (11,))]
    got = step.gradient(step.score([group]), LOGITS, reference=LOGITS)
    # Three tokens of 1/2 and one of -1/2: mean 1/4, deviation sqrt(3)/4.
    advantages = [1 / np.sqrt(3), -np.sqrt(3)]
    assert advantages == pytest.approx(whitened([1, 0], [3, 1]), rel=1e-9)
    expected = policy_gradient(advantages, [(1, 2, 3), (11,)], LOGITS, "tokens")
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)


def test_groups_without_a_difference_are_left_out(step, recipe_step):
    tasks = [TASK, Task(id="u", prompt="What is 1 + 3?", answer="4"), Task(id="v", prompt="What is 4?", answer="4")]
    batch = recipe_step("brorl", tasks).score([responses([1, 2]), responses([1, 11]), responses([11, 12])])
    assert {rollout.task.id for rollout in batch.rollouts} == {"u"}


def test_groups_share_one_scale(recipe_step):
    """A group of one right in four weighs as much as its rewards say: no group is divided by its own deviation."""
    tasks = [TASK, Task(id="u", prompt="What is 1 + 3?", answer="4")]
    first, second = [1, 11, 12, 13], [2, 3, 14, 15]
    batch = recipe_step("brorl", tasks).score([responses(first), responses(second)])
    centred = np.asarray([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    np.testing.assert_allclose(batch.column("advantage"), centred / np.sqrt(np.mean(centred**2)), rtol=1e-6)


def test_the_upper_clip_is_wider(step):
    """Of two tokens of probability 1/2, one right: after it rose by a factor of 1.26 it still has a gradient, after
    1.28 it has none; a fall of the wrong one stops to be rewarded at 0.8."""
    batch = step.score([[Response("\\boxed{4}", (0,)), Response("\\boxed{5}", (1,))]])

    def gradient(p):
        moved = [np.log(p / (1 - p)), 0.0]
        return step.gradient(batch, moved, old=[0.0, 0.0], reference=moved)

    # d rho / d logit = rho (1 - p), the advantage is 1; the wrong one's ratio is below 0.8 and gives nothing.
    assert gradient(0.63)[0] == pytest.approx(-1.26 * 0.37 / 2, rel=1e-6)
    assert gradient(0.64)[0] == 0
    # A ratio of 0.81 of the wrong one, beside 1.19 of the right one: both have a gradient; 0.79 and 1.21: one has.
    assert gradient(0.595)[0] == pytest.approx(-(1.19 * 0.405 + 0.81 * 0.595) / 2, rel=1e-6)
    assert gradient(0.605)[0] == pytest.approx(-1.21 * 0.395 / 2, rel=1e-6)


def test_the_pull_to_the_reference_is_weak_and_bounded(step):
    """The gradient of k2, (log pi - log reference)^2 / 2, times 0.0001; a token whose k2 is above 10 has none."""
    batch = step.score([[Response("\\boxed{4}", (0,)), Response("\\boxed{5}", (1,))]])
    logits, reference = [0.0, 0.0], [0.5, -0.3]

    def pull(reference):
        return step.gradient(batch, logits, reference=reference) - step.gradient(batch, logits, reference=logits)

    distance = np.log(softmax(logits)) - np.log(softmax(reference))
    expected = sum(1e-4 * distance[token] * score_function([token], logits) / 2 for token in (0, 1))
    np.testing.assert_allclose(pull(reference), expected, rtol=1e-6, atol=1e-14)
    far = [0.0, -6.0]
    distance = np.log(softmax(logits)) - np.log(softmax(far))
    assert distance[0] ** 2 / 2 < 10 < distance[1] ** 2 / 2
    expected = 1e-4 * distance[0] * score_function([0], logits) / 2
    np.testing.assert_allclose(pull(far), expected, rtol=1e-6, atol=1e-14)


def test_sampling_and_resets():
    config = plan_of("brorl").config
    assert config.rollout.group_size == 512
    assert config.rollout.dynamic_sampling.attempts == 10
    assert config.algorithm.kl.renew_every == 200


@pytest.mark.parametrize(("ratio", "kept"), [(0.49, 0), (0.51, 1), (4.9, 1), (5.1, 0)])
def test_tokens_far_from_the_engine_s_are_left_out(step, ratio, kept):
    """A token weighs the ratio of its probability to the engine's, and nothing outside of 0.5 to 5."""
    batch = step.score([[Response("\\boxed{4}", (0,)), Response("\\boxed{5}", (1,))]])
    logits = np.log([0.4, 0.4, 0.2]).tolist()
    engine = np.log([0.4 / ratio, 0.1, 0.9 - 0.4 / ratio]).tolist()
    expected = -(kept * ratio * score_function([0], logits) - 4 * score_function([1], logits)) / 2
    got = step.gradient(batch, logits, reference=logits, engine=engine)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(("distance", "pulls"), [(4.4, True), (4.5, False)])
def test_the_pull_ends_at_a_bound_of_ten(step, distance, pulls):
    """Half of the squared log-ratio is 9.7 and 10.1."""
    batch = step.score([[Response("\\boxed{4}", (0,)), Response("\\boxed{5}", (1,))]])
    logits = np.log([0.4, 0.4, 0.2]).tolist()
    far = 0.4 * np.exp(-distance)
    reference = np.log([far, 0.4, 0.6 - far]).tolist()
    change = step.gradient(batch, logits, reference=reference) - step.gradient(batch, logits, reference=logits)
    expected = pulls * 1e-4 * distance * score_function([0], logits) / 2
    np.testing.assert_allclose(change, expected, rtol=1e-6, atol=1e-12)
