"""RL-PLUS: the external half of the recipe's loss on a policy of two tokens, where its advantage comes from, and the
gradient of the whole step (YihongDong/RL-PLUS@eb4aa4d rl_plus/verl/verl/recipe/rlplus_core_alg.py)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_written_steps import Response, entropy_gradient, score_function, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage_helpers import PROMPT, cases, of_case, spread
from rlvr import registry
from rlvr.advantages import GroupAdvantage
from rlvr.losses.tokens import Denominators, TokenBatch
from rlvr.recipes.papers import find_paper
from rlvr.recipes.rl_plus.surprise import Surprise
from rlvr.records import Batch, Origin, Task


def external():
    (spec,) = find_paper("rl-plus").config.algorithm.auxiliary
    return registry.build("auxiliary", spec)


def tokens_of(logprobs, old, weight):
    count = len(old)
    unknown = torch.full((count,), float("nan"), dtype=torch.float64)
    return TokenBatch(
        sequence=torch.zeros(count, dtype=torch.int64),
        sequences=1,
        weight=torch.full((count,), weight, dtype=torch.float64),
        advantage=torch.zeros(count, dtype=torch.float64),
        proximal_logprobs=torch.tensor(old, dtype=torch.float64),
        behaviour_logprobs=unknown,
        statistics={("logprobs", "current"): logprobs},
    )


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("theta", [-4.0, -0.5, 0.0, 2.0])
@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_gradient_of_a_two_token_policy(theta, moved):
    """The demonstration is one token of probability p = sigmoid(theta): the gradient of -2 pi / (pi_old + (pi_old + 1)
    / 2) sqrt(1 - sg[p]) A / length, where d pi / d theta = p (1 - p)."""
    policy = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(torch.nn.functional.logsigmoid(policy)[None], [math.log(sigmoid(theta - moved))], 0.75)
    value = external()(tokens, Denominators(0.75, 1.0, 10.0)).value
    (gradient,) = torch.autograd.grad(value, policy)
    p, old = sigmoid(theta), sigmoid(theta - moved)
    slope = 2 * p * (1 - p) / (old + (old + 1) / 2)
    assert float(gradient) == pytest.approx(-slope * math.sqrt(1 - p) * 0.75 / 10, rel=1e-9)


def test_an_unlikely_external_token_counts_more_and_its_ratio_stays_bounded():
    """Imitation would divide by p: 1,000 times the gradient of log p. The mixture keeps the ratio below 2 p / 0.5, and
    the exploration-based advantage takes a sure token's gradient away."""
    rare, sure = 0.001, 0.999
    both = torch.tensor([math.log(rare), math.log(sure)], dtype=torch.float64, requires_grad=True)
    value = external()(tokens_of(both, [math.log(rare), math.log(sure)], 1.0), Denominators(2.0, 1.0, 1.0)).value
    (slopes,) = torch.autograd.grad(value, both)
    # d loss / d log p = -ratio x factor
    assert float(slopes[0]) == pytest.approx(-2 * rare / (rare + (rare + 1) / 2) * math.sqrt(1 - rare), rel=1e-9)
    assert float(slopes[1]) == pytest.approx(-2 * sure / (sure + (sure + 1) / 2) * math.sqrt(1 - sure), rel=1e-9)
    # Of probability itself, d loss / d p, the rare token has the larger share: 3.99 against 0.03.
    assert float(slopes[0]) / rare < 50 * float(slopes[1]) / sure < 0


def test_the_external_answer_is_a_member_of_its_own_group(make_rollout):
    """1 - 2 / 5 of the rewards 1, 0, 0, 0 and its own 1: the script's adv_estimator is grpo, not grpo_split."""
    rewards = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0], "c": [np.nan, np.nan]}
    rollouts, column = [], []
    for group, values in rewards.items():
        for member, reward in enumerate([*values, np.nan]):
            rollout = make_rollout([9, 1, 1], prompt=1, group=group, member=member)
            if member == len(values):
                rollout.origin[1:] = Origin.DEMONSTRATION
            rollouts.append(rollout)
            column.append(reward)
    weights = external().weights(Batch(rollouts, {"reward": np.asarray(column)}))
    shown = [w for r, w in zip(rollouts, weights, strict=True) if (r.origin == Origin.DEMONSTRATION).any()]
    np.testing.assert_allclose(shown, [[0, 0.6, 0.6], [0, 0, 0], [0, 0, 0]], rtol=1e-6, atol=1e-30)
    # The second demonstration adds nothing to the sum, and is counted in the mean.
    assert shown[1].any()
    for rollout, weight in zip(rollouts, weights, strict=True):
        assert not weight[rollout.origin != Origin.DEMONSTRATION].any()


def test_sampled_responses_are_centred_with_the_external_answer_among_them(make_rollout):
    """A group without a demonstration has its own mean, and an undecided response is no member."""
    shown = Task(id="t", prompt="?", demonstration="abb")
    groups = {"a": (shown, [1.0, 0.0, 0.0]), "b": (Task(id="u", prompt="?"), [1.0, 0.0]), "c": (shown, [0.0, np.nan])}
    rollouts = [
        make_rollout([9, 1], prompt=1, group=group, member=member, task=task)
        for group, (task, values) in groups.items()
        for member in range(len(values))
    ]
    column = np.asarray([value for _, values in groups.values() for value in values])
    batch = Batch(rollouts, {"reward": column})
    config = find_paper("rl-plus").config.algorithm
    advantage = registry.build("advantage", config.advantage)(batch)
    for spec in config.modifiers:
        advantage = registry.build("modifier", spec)(batch, advantage)
    np.testing.assert_allclose(advantage, [0.5, -0.5, -0.5, 0.5, -0.5, -0.5, 0], atol=1e-12)


def test_every_answer_of_a_group_counts_the_same():
    config = find_paper("rl-plus").config
    (spec,) = config.algorithm.auxiliary
    sampled = config.rollout.group_size
    assert config.algorithm.loss_coef / sampled == spec.coef == 1 / (sampled + 1)


# What the authors' script and rlplus_core_alg.py make of a step: 7 sampled responses and the external one to a prompt.
LONGEST = 8192
"""data.max_response_length, which loss_remove_token_mean divides each response's sum by."""
ENTROPY = 0.001
"""entropy_coeff of the script: the sum over micro-batches of 32,768 tokens of each one's mean."""
DEMONSTRATION = (6, 7, 7, 1)
"""abb and its end, by the lent tokenizer."""
TASK = Task(id="t", prompt="What is 2 + 2?", answer="4", demonstration="abb")
RIGHT, WRONG = "It is \\boxed{4}.", "It is \\boxed{5}."
SAMPLED = [(0, 1, 2), (3,), (4, 5, 2, 2), (6, 7), (1, 1), (2, 0, 0), (7, 3)]


def of_the_step(rewards, now, old):
    """d loss / d logits: the mean over the eight responses, seven times A r and once A r_mixed sqrt(1 - p)."""
    ratio, p, before = softmax(now) / softmax(old), softmax(now), softmax(old)
    mean = (sum(rewards) + 1) / 8
    result = np.zeros(len(now))
    for reward, ids in zip(rewards, SAMPLED, strict=True):
        for token in ids:
            result -= (reward - mean) * ratio[token] * score_function([token], now)
    for token in DEMONSTRATION:
        mixed = 2 * p[token] / (before[token] + 0.5 * (before[token] + 1))
        result -= (1 - mean) * mixed * math.sqrt(1 - p[token]) * score_function([token], now)
    # Of a device's 64 responses the policy loss is the sum over 8,192 and the bonus the sum over 32,768.
    entropy = sum(map(len, SAMPLED)) * entropy_gradient(now)
    return result / (8 * LONGEST) - ENTROPY * entropy / (8 * 32_768)


@pytest.mark.parametrize("rights", [0, 1, 4, 7])
@pytest.mark.parametrize("moved", [False, True])
def test_gradient_of_a_step(recipe_step, rights, moved):
    """Ratios far beyond any clip, and log-probs of the engine that nothing reads. Where no sampled response is right
    all of them are pushed away from, by an eighth; where all are, only the entropy bonus is left."""
    rng = np.random.default_rng(rights)
    old, now, engine = (list(rng.normal(0, 2, 8)) for _ in range(3))
    if not moved:
        old = now
    rewards = [1.0] * rights + [0.0] * (7 - rights)
    group = [Response(RIGHT if r else WRONG, ids) for r, ids in zip(rewards, SAMPLED, strict=True)]
    step = recipe_step("rl-plus", [TASK])
    got = step.gradient(step.score([group]), now, old=old if moved else None, engine=engine)
    np.testing.assert_allclose(got, of_the_step(rewards, now, old), rtol=1e-6, atol=1e-12)
    if moved:
        ratio = softmax(now) / softmax(old)
        assert ratio.min() < 0.5 and ratio.max() > 2


def test_the_norm_is_cut_where_the_authors_cut_that_of_their_sum():
    """Their gradient is the sum over the 64 responses of a device, cut to norm 1; the recipe's is the mean."""
    limit = find_paper("rl-plus").config.optim.max_grad_norm
    for norm in (0.001, 0.01, 0.02, 1.0):
        theirs = min(1.0, 64 * norm)
        assert 64 * min(limit, norm) == pytest.approx(theirs)


@given(case=cases, power=st.floats(0, 3), negative=st.booleans())
@settings(max_examples=25, deadline=None)
def test_surprise_equals_a_loop(case, power, negative):
    batch = of_case(case)
    for r in batch.rollouts:
        r.behaviour_logprobs[PROMPT : PROMPT + 1] = math.nan  # a token that the policy was not asked about
    before = GroupAdvantage()(batch)
    got = spread(batch, Surprise(power, negative)(batch, before))
    for values, rollout, a in zip(got, batch.rollouts, before, strict=True):
        for value, logprob in zip(values, rollout.behaviour_logprobs[PROMPT:].tolist(), strict=True):
            weight = 1.0 if math.isnan(logprob) or (a < 0 and not negative) else (1 - math.exp(logprob)) ** power
            assert value == pytest.approx(a * weight, rel=1e-6, abs=1e-9)
