"""CANON: at the setting that the recipe ships, a response is compared with the half of the other entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, clipped_gradient, moved_policy, probing_group

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task
from rlvr.stages.grpo import scoring


@pytest.fixture
def advantages(make_rollout):
    """`advantages([(reward, [entropy of each token]), ...])` of one group, by the recipe's own estimator."""

    def make(members):
        rollouts = [make_rollout([9] + [1] * len(e), prompt=1, member=m) for m, (_, e) in enumerate(members)]
        batch = Batch(rollouts, {"reward": np.asarray([reward for reward, _ in members], dtype=np.float64)})
        batch.token_columns["entropy/current"] = [np.asarray([np.nan, *entropies]) for _, entropies in members]
        return registry.build("advantage", find_paper("canon").config.algorithm.advantage)(batch)

    return make


def of_the_paper(members):
    """Equation 5 with mu = 1, by a loop: the reward minus the mean reward of the half that it is not in."""
    order = sorted(range(len(members)), key=lambda i: math.fsum(members[i][1]) / len(members[i][1]))
    low, high = order[: len(order) // 2], order[len(order) // 2 :]
    result = []
    for i, (reward, _) in enumerate(members):
        others = high if i in low else low
        result.append(reward - math.fsum(members[j][0] for j in others) / len(others))
    return result


def test_the_shipped_estimator_is_the_comparison_between_the_halves(advantages):
    rng = np.random.default_rng(0)
    size = find_paper("canon").config.rollout.group_size
    assert size == 16
    for count in (size, size - 1):
        members = [(float(rng.integers(2)), rng.random(int(rng.integers(1, 6))).tolist()) for _ in range(count)]
        np.testing.assert_allclose(advantages(members), of_the_paper(members), rtol=0, atol=1e-12)


def test_the_half_that_does_better_is_amplified(advantages):
    """Three of four right at high entropy, one of four at low: a right answer of high entropy gains 3/4, one of low
    entropy 1/4. With the group's mean, which is the setting `mix: 0.5`, both would gain 1/2."""
    high = [(1.0, [0.9]), (1.0, [0.8]), (1.0, [0.9, 0.7]), (0.0, [0.9])]
    low = [(1.0, [0.1]), (0.0, [0.2]), (0.0, [0.1, 0.3]), (0.0, [0.2])]
    np.testing.assert_allclose(
        advantages(high + low), [0.75, 0.75, 0.75, -0.25, 0.25, -0.75, -0.75, -0.75], rtol=0, atol=1e-12
    )


def test_the_metric_and_not_the_order_of_the_group_decides(advantages):
    """The same rewards with the entropies exchanged: the direction turns over, no direction is built in."""
    rewards = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    entropies = [0.9, 0.8, 0.85, 0.95, 0.1, 0.2, 0.15, 0.25]
    got = advantages([(r, [e]) for r, e in zip(rewards, entropies, strict=True)])
    turned = advantages([(r, [1 - e]) for r, e in zip(rewards, entropies, strict=True)])
    np.testing.assert_allclose(got, turned, rtol=0, atol=1e-12)
    mixed = advantages([(r, [e]) for r, e in zip(rewards, entropies[::2] + entropies[1::2], strict=True)])
    assert np.abs(got - mixed).max() > 0.1


def test_gradient_of_the_recipe(recipe_step, monkeypatch):
    """agg_loss with seq-mean-token-sum-norm over 8,192 tokens (scripts/setups.sh and core_algos.py of biuboomc/CANON,
    commit 7d6f814), clip 0.2 below and 0.28 above, at most 3 times a negative advantage, no KL, no entropy bonus, and
    no weight for the engine's log-probs."""
    entropies = np.linspace(0.1, 1.2, 12) ** 2

    def add_statistics(policy, batch, needs, where, optim):
        batch.token_columns["entropy/current"] = [
            np.where(on, entropies[r.token_ids], np.nan) for on, r in zip(where, batch.rollouts, strict=True)
        ]

    monkeypatch.setattr(scoring, "add_statistics", add_statistics)
    logits, old = moved_policy(12)
    step = recipe_step("canon", [Task(id="t", prompt="What is 2 + 2?", answer="4")])
    right, wrong = "\\boxed{4}", "\\boxed{5}"
    group = [*probing_group(right, wrong), Response(wrong, (1, 2, 3)), Response(right, (8, 8, 9, 2))]
    batch = step.score([group])
    ids = [response.ids for response in group]
    members = [(float(r.text == right), [entropies[token] for token in r.ids]) for r in group]
    advantages = of_the_paper(members)
    np.testing.assert_allclose(batch.column("advantage"), advantages, rtol=1e-9)
    expected = clipped_gradient(advantages, ids, logits, old, "constant", clip=(0.2, 0.28), cap=3.0, longest=8192)
    for engine in (None, np.linspace(1, 0, 12).tolist()):
        got = step.gradient(batch, logits, old=old, engine=engine)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-15)
