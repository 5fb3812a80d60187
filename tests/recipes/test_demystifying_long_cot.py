"""The repetition penalty of "Demystifying Long Chain-of-Thought": per token, bounded, with its own discount."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hand_written_steps import Response, clipped_gradient, moved_policy, softmax

from rlvr import registry
from rlvr.config import Config
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task, Verdict
from rlvr.rewards import RewardContext, bind, build_terms, score
from rlvr.stages.grpo import reference_penalty

GRAM, PENALTY, GAMMA = 40, -0.05, 0.99
"""--math_rule_common_repetition_ngram_size, --math_rule_repetition_dense_penalty and the second of --gamma."""
LONGEST = 14336
"""--generate_max_len"""


@pytest.fixture
def returns(make_rollout):
    """`returns([ids, ...])`: the recipe's advantage of the penalty's stream at sampled tokens; outcomes are equal."""

    def make(responses):
        config = find_paper("demystifying-long-cot").config
        rollouts = [make_rollout([9, *ids], prompt=1, member=m) for m, ids in enumerate(responses)]
        for rollout in rollouts:
            rollout.verdicts["math"] = Verdict.from_score(1.0)
        penalty = [term for term in config.rewards if term.column == "repeated_tokens"]
        batch = score(Batch(rollouts), bind(build_terms(penalty), RewardContext(config, [])))
        advantage = registry.build("advantage", config.algorithm.advantage)
        advantage.check(config, [])
        return [values[1:] for values in advantage(batch)]

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


def rewarded(make_rollout, config, cases):
    """The rewards that a configuration gives to responses (length, score), None for an undecided one."""
    rollouts = []
    for member, (length, value) in enumerate(cases):
        rollout = make_rollout([9] + [1] * length, prompt=1, member=member)
        rollout.verdicts["math"] = Verdict.undecided("down") if value is None else Verdict.from_score(float(value))
        rollouts.append(rollout)
    batch = Batch(rollouts)
    score(batch, bind(build_terms(config.rewards), RewardContext(config, [])))
    return batch.columns["reward"]


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

    def cosine(length, right):
        short, long = (2.0, 1.0) if right else (-10.0, 0.0)
        return long + 0.5 * (short - long) * (1 + math.cos(math.pi * length / LONGEST))

    expected = [-10.0 if length == LONGEST else cosine(length, is_right) for length, is_right in cases]
    config = find_paper("demystifying-long-cot").config
    np.testing.assert_allclose(rewarded(make_rollout, config, cases), expected, rtol=1e-12)


def test_the_cosine_reward_by_hand(make_rollout):
    """Of a run whose longest response has 10 tokens, or 9; a partial score is wrong, an undecided one has no value."""
    ten = Config.model_validate({"rollout": {"max_new_tokens": 10}, "rewards": ["cosine_length"]})
    cases = [(0, 1), (5, 1), (0, 0), (5, 0), (5, None), (10, 1), (5, 0.5)]
    np.testing.assert_allclose(rewarded(make_rollout, ten, cases), [2, 1.5, -10, -5, math.nan, -10, -5], atol=1e-12)
    nine = Config.model_validate({"rollout": {"max_new_tokens": 9}, "rewards": ["cosine_length"]})
    third = 1 + 0.5 * (1 + math.cos(math.pi / 3))
    np.testing.assert_allclose(rewarded(make_rollout, nine, [(3, 1)]), [third], atol=1e-12)


def test_the_cosine_reward_with_equal_ends_is_the_verdict(make_rollout):
    flat = {"name": "cosine_length", "right": [1, 1], "wrong": [0, 0], "exceeded": 0}
    ten = Config.model_validate({"rollout": {"max_new_tokens": 10}, "rewards": [flat]})
    values = rewarded(make_rollout, ten, [(1, 1), (7, 0), (2, None), (9, 1)])
    np.testing.assert_allclose(values, [1, 0, math.nan, 1], atol=1e-12)


KL = 0.01
"""--init_kl_coef"""
TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"
LOGITS, OLD = moved_policy(12)
LOG_RATIO = np.linspace(-1, 1, 12)
"""log pi / pi_reference before the update, by token."""


class Reference:
    """A snapshot whose log-probs are written by hand."""

    active = False

    @contextlib.contextmanager
    def in_place(self):
        self.active = True
        yield
        self.active = False


@pytest.fixture
def step(recipe_step, monkeypatch):
    reference = Reference()

    def add_statistics(policy, batch, needs, where, optim):
        table = np.zeros(12) if reference.active else LOG_RATIO
        batch.token_columns["logprobs/current"] = [
            np.where(on, table[r.token_ids], np.nan) for on, r in zip(where, batch.rollouts, strict=True)
        ]

    monkeypatch.setattr(reference_penalty, "add_statistics", add_statistics)
    opened = recipe_step("demystifying-long-cot", [TASK])
    opened.stage.reference = reference
    return opened


def value(text, ids):
    """The cosine reward of a short response."""
    way = (1 + math.cos(math.pi * len(ids) / LONGEST)) / 2
    return 1 + way if text == RIGHT else -10 * way


def advantages_of_the_recipe(group):
    """Outcome against the group's mean, the penalty's stream and the KL from each token on, whitened over tokens."""
    outcomes = [value(text, ids) for text, ids in group]
    rows = []
    for (_, ids), outcome in zip(group, outcomes, strict=True):
        stream = of_the_authors(list(ids))
        to_come = [KL * math.fsum(LOG_RATIO[token] for token in ids[t:]) for t in range(len(ids))]
        centred = outcome - math.fsum(outcomes) / len(outcomes)
        rows.append([centred + s - k for s, k in zip(stream, to_come, strict=True)])
    flat = [a for row in rows for a in row]
    mean = math.fsum(flat) / len(flat)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / len(flat))
    return [[(a - mean) / deviation for a in row] for row in rows]


GROUP = [
    *[(text, (number,)) for number in range(1, 9) for text in (RIGHT, WRONG)],
    (RIGHT, (5,) * 45),
    (WRONG, (1, 2, 3, 6, 7)),
]


def test_advantages_of_tokens(step):
    batch = step.score([[Response(text, ids) for text, ids in GROUP]])
    for got, expected in zip(batch.tokens("advantage"), advantages_of_the_recipe(GROUP), strict=True):
        np.testing.assert_allclose(got[1:], expected, rtol=1e-6, atol=1e-9)


def test_gradient(step):
    """clip 0.2 on both sides (--eps_clip), the mean over each response (PolicyLoss with masked_mean and then a mean),
    and no weight for the engine's log-probs."""
    batch = step.score([[Response(text, ids) for text, ids in GROUP]])
    ids = [own for _, own in GROUP]
    expected = clipped_gradient(advantages_of_the_recipe(GROUP), ids, LOGITS, OLD, "sequences")
    for engine in (None, np.log(softmax(LOG_RATIO)).tolist()):
        got = step.gradient(batch, LOGITS, old=OLD, engine=engine)
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)
