"""The repetition penalty of "Demystifying Long Chain-of-Thought": per token, bounded, with its own discount."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Verdict
from rlvr.rewards import RewardContext, bind, build_terms, score

GRAM, PENALTY, GAMMA = 40, -0.05, 0.99
"""--math_rule_common_repetition_ngram_size, --math_rule_repetition_dense_penalty and the second of --gamma."""
LONGEST = 14336
"""--generate_max_len"""


@pytest.fixture
def returns(make_rollout):
    """`returns([ids, ...], before=0)`: what the recipe's modifier makes of an advantage at sampled tokens."""

    def make(responses, before=0.0):
        rollouts = [make_rollout([9, *ids], prompt=1, member=m) for m, ids in enumerate(responses)]
        batch = Batch(rollouts, {"reward": np.ones(len(rollouts))})
        modifier = registry.build("modifier", find_paper("demystifying-long-cot").config.algorithm.modifiers[0])
        return [values[1:] for values in modifier(batch, np.full(len(rollouts), before))]

    return make


def of_the_authors(ids):
    """RepetitionDensePenalty, then the returns of get_advantages_and_returns for that stream, by their loops."""
    reward, seen = [0.0] * len(ids), set()
    for start in range(len(ids) - GRAM + 1):
        gram = tuple(ids[start : start + GRAM])
        if gram in seen:
            for i in range(start, start + GRAM):
                reward[i] = PENALTY
        seen.add(gram)
    result, following = [0.0] * len(ids), 0.0
    for t in reversed(range(len(ids))):
        following = result[t] = reward[t] + GAMMA * following
    return result


def test_the_stream_equals_the_authors_loops(returns):
    rng = np.random.default_rng(0)
    sentence = rng.integers(1, 100, 55).tolist()
    responses = [
        rng.integers(1, 100, 120).tolist(),
        [*sentence, *rng.integers(1, 100, 30).tolist(), *sentence, 1, 2, 3],
        sentence * 4,
        [5] * 200,
        sentence[:39] * 2,
        [],
    ]
    for got, ids in zip(returns(responses), responses, strict=True):
        np.testing.assert_allclose(got, of_the_authors(ids), rtol=1e-12, atol=1e-15)
    assert not returns(responses)[0].any()
    np.testing.assert_allclose(returns(responses[1:2], 0.7)[0], 0.7 + np.asarray(of_the_authors(responses[1])))


def test_a_degenerate_response_costs_about_as_much_as_a_wrong_one(returns):
    """14,000 tokens of one kind: -5 at most, beside the cosine's -10 to 2. A sum over the response would be -700."""
    (values,) = returns([[5] * 14000])
    bound = PENALTY / (1 - GAMMA)
    assert bound == pytest.approx(-5)
    assert bound < values.min() < 0.99 * bound
    assert values[-1] == pytest.approx(PENALTY)


def test_the_penalty_is_where_the_repetition_is(returns):
    """200 tokens before a repetition 0.99 ^ 200 = 13 % of it is left; after it there is none."""
    loop = list(range(1000, 1040))
    ids = [*range(200), *loop, *loop, *range(500, 520)]
    (values,) = returns([ids])
    assert not values[-20:].any()
    # The first token of the repeated 40-gram has all of it: sum of 0.99 ^ k over 40 tokens.
    whole = PENALTY * (1 - GAMMA**40) / (1 - GAMMA)
    assert values[240] == pytest.approx(whole)
    assert values[0] == pytest.approx(whole * GAMMA**240)


def test_the_cosine_reward_of_ten_responses(make_rollout):
    cases = [
        (0, 1),
        (3584, 1),
        (7168, 1),
        (10752, 1),
        (14335, 1),
        (0, 0),
        (7168, 0),
        (14335, 0),
        (14336, 1),
        (14336, 0),
    ]
    rollouts = []
    for member, (length, is_right) in enumerate(cases):
        rollout = make_rollout([9] + [1] * length, prompt=1, member=member)
        rollout.verdicts["math"] = Verdict.from_score(float(is_right))
        rollouts.append(rollout)
    batch = Batch(rollouts)
    config = find_paper("demystifying-long-cot").config
    score(batch, bind(build_terms(config.rewards), RewardContext(config, [])))

    def cosine(length, right):
        short, long = (2.0, 1.0) if right else (-10.0, 0.0)
        return long + 0.5 * (short - long) * (1 + math.cos(math.pi * length / LONGEST))

    expected = [-10.0 if length == LONGEST else cosine(length, is_right) for length, is_right in cases]
    np.testing.assert_allclose(batch.columns["reward"], expected, rtol=1e-12)
