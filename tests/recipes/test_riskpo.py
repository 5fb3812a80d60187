"""RiskPO: the advantages of bundles at the recipe's own setting, by a loop over papers."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hand_written_steps import BEFORE, ENGINE, MOVED, TWO_AND_TWO, Response, clipped_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage_helpers import assert_alone, assert_ordered, assert_sound, batch_of, cases, members, of_case
from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.recipes.papers import find_paper
from rlvr.recipes.riskpo.risk import MixedValueAtRisk
from rlvr.records import Batch, Task

LOWER, UPPER, WEIGHT, RATE = 0.2, 0.8, 1.5, 0.1
"""quantile_down, quantile_up, w_mix and lr_q of run_qwen2.5_1.5b_MVaR_dapomath.sh."""


def quantile(values, level):
    ordered = sorted(values)
    place = level * (len(ordered) - 1)
    below = int(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


def joined(lists):
    return [value for values in lists for value in values]


def of_the_authors(groups, quantiles):
    """Their advantages, and the scores of all papers."""
    result = [[0.0] * len(members) for members in groups]
    bundles = [list(range(first, min(first + 5, len(groups)))) for first in range(0, len(groups), 5)]
    scores = [[sum(groups[g][i] for g in bundle) for i in range(len(groups[bundle[0]]))] for bundle in bundles]
    low, high = quantiles or [quantile(joined(scores), level) for level in (LOWER, UPPER)]
    for bundle, papers in zip(bundles, scores, strict=True):
        if len(set(papers)) == 1:
            continue
        for i, s in enumerate(papers):
            middle = (max(s - low, 0) - max(s - high, 0)) / (UPPER - LOWER)
            tail = -max(low - s, 0) / LOWER
            value = (WEIGHT * tail + middle) / (WEIGHT + 1) / (statistics.stdev(papers) + 1e-6)
            gains = [groups[g][i] - statistics.fmean(groups[g]) for g in bundle]
            for g, gain in zip(bundle, gains, strict=True):
                result[g][i] = value * (gain / sum(gains) if abs(sum(gains)) > 1e-6 else 1 / len(bundle))
    return result, joined(scores)


@pytest.fixture
def batch(make_rollout):
    def make(groups):
        places = [(g, m) for g, members in enumerate(groups) for m in range(len(members))]
        rollouts = [make_rollout([9, 1], prompt=1, group=f"g{g:03}", member=m) for g, m in places]
        return Batch(rollouts, {"reward": np.asarray([reward for members in groups for reward in members], float)})

    return make


def estimator():
    return registry.build("advantage", find_paper("riskpo").config.algorithm.advantage)


@pytest.mark.parametrize("seed", range(3))
def test_three_steps_equal_a_loop_with_tracked_quantiles(batch, seed):
    rng = np.random.default_rng(seed)
    estimate, quantiles = estimator(), None
    for _ in range(3):
        # 12 prompts: two bundles of five and one of the last two.
        groups = [[1 if rng.random() < rate else -1 for _ in range(10)] for rate in rng.uniform(0.1, 0.9, 12)]
        expected, scores = of_the_authors(groups, quantiles)
        np.testing.assert_allclose(estimate(batch(groups)), joined(expected), rtol=1e-5, atol=1e-6)
        estimate.observe({})
        # The released tracker: the first batch sets the quantiles, each later one moves them.
        if quantiles is None:
            quantiles = [quantile(scores, level) for level in (LOWER, UPPER)]
        else:
            shares = [statistics.fmean(s < q for s in scores) for q in quantiles]
            pairs = zip(quantiles, (LOWER, UPPER), shares, strict=True)
            quantiles = [q + RATE * (level - share) for q, level, share in pairs]


def test_good_papers_are_reinforced_and_the_tail_weighs_more(batch):
    """Bundles of equal prompts: papers of 0, 2, 3, 4, 5 right answers."""
    counts = [0, 2, 3, 3, 3, 3, 4, 4, 4, 5]
    groups = [[1 if question < count else -1 for count in counts] for question in range(5)]
    got = estimator()(batch(groups)).reshape(5, 10)
    papers = got.sum(axis=0)
    # Sums of shares are the paper's advantage: the worst one's is the largest, and the upper half is reinforced.
    assert papers[0] < 0 < papers[-1]
    assert abs(papers[0]) > papers[-1]
    # Above the upper quantile nothing is gained by a further right answer.
    assert papers[-1] == pytest.approx(papers[-2])


def test_a_bundle_of_one_score_has_no_advantage(batch):
    estimate = estimator()
    estimate(batch([[-1, 1] * 5 for _ in range(5)]))
    estimate.observe({})
    assert not estimate(batch([[1] * 10 for _ in range(5)])).any()


TASKS = [Task(id=str(n), prompt="What is 2 + 2?", answer="4") for n in range(10)]


def test_ten_responses(recipe_step):
    """math_dapo.py pays 1 and -1."""
    got = recipe_step("riskpo", TASKS[:1]).rewards([text for text, _ in TWO_AND_TWO])
    assert got == [1.0 if right else -1.0 for _, right in TWO_AND_TWO]


@pytest.mark.parametrize("moved", [False, True])
def test_gradient_of_a_step(recipe_step, moved):
    """Of two bundles, by the clipped ratio to the policy before the update: 0.2 on both sides and a dual clip of 3
    (verl/trainer/config/actor/actor.yaml), the mean over tokens, and nothing of the engine's log-probs."""
    rng = np.random.default_rng(7)
    groups = [[1 if rng.random() < rate else -1 for _ in range(10)] for rate in np.linspace(0.2, 0.8, 10)]
    ids = [[tuple(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(10)] for _ in range(10)]
    texts = {1: TWO_AND_TWO[0][0], -1: TWO_AND_TWO[5][0]}
    responses = [
        [Response(texts[reward], own) for reward, own in zip(rewards, of, strict=True)]
        for rewards, of in zip(groups, ids, strict=True)
    ]
    step = recipe_step("riskpo", TASKS)
    old = BEFORE if moved else None
    got = step.gradient(step.score(responses), MOVED, old=old, engine=ENGINE)
    advantages, _ = of_the_authors(groups, None)
    before = BEFORE if moved else MOVED
    expected = clipped_gradient(joined(advantages), joined(ids), MOVED, before, "tokens", cap=3.0)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


def risk(scores, s, lower, upper, weight):
    """By the definition of the two tails."""
    low, high = (float(np.quantile(scores, q)) for q in (lower, upper))
    middle = (max(s - low, 0) - max(s - high, 0) + low - high) / (upper - lower)
    tail = 0.0 if lower == 0 else -max(low - s, 0) / lower
    return (weight * tail + middle) / (weight + 1) if lower else middle


@given(case=cases, lower=st.sampled_from([0.0, 0.2, 0.5]), weight=st.floats(0, 3), data=st.data())
@settings(max_examples=40, deadline=None)
def test_mixed_value_at_risk_of_single_prompts(case, lower, weight, data):
    batch, estimate = of_case(case), MixedValueAtRisk(lower, 0.8, weight)
    rewards, groups, _ = zip(*case, strict=True)
    got = estimate(batch)
    assert_sound(batch, got)
    for i, r in enumerate(rewards):
        scores = [rewards[j] for j in members(rewards, groups, i)]
        want = risk(scores, r, lower, 0.8, weight) if math.isfinite(r) else 0.0
        assert got[i] == pytest.approx(want, abs=1e-9)
    assert_ordered(estimate, batch, data.draw(st.permutations(range(len(case)))))
    assert_alone(estimate, batch, batch_of([5.0, -2.0, math.nan], [8, 8, 9]))


def test_a_bundle_pairs_members_and_leaves_the_rest():
    """Groups 0 and 1 make papers (1, 0), (0, 2): means 1/2 and 1; the third of group 1 has no partner; group 2 is
    alone."""
    rewards, groups = [1.0, 0.0, 0.0, 2.0, 7.0, math.nan, 3.0, 5.0], [0, 0, 1, 1, 1, 1, 2, 2]
    batch, estimate = batch_of(rewards, groups), MixedValueAtRisk(0.5, 1.0, 1.0, bundle=2)
    first, second = (risk([0.5, 1.0], s, 0.5, 1.0, 1.0) for s in (0.5, 1.0))
    third, fourth = (risk([3.0, 5.0], s, 0.5, 1.0, 1.0) for s in (3.0, 5.0))
    want = [first, second, first, second, 0, 0, third, fourth]
    np.testing.assert_allclose(estimate(batch), want, atol=1e-12)
    within = [1, 0, 4, 3, 2, 5, 7, 6]  # the order of members says nothing
    np.testing.assert_allclose(estimate(batch.select(within)), np.asarray(want)[within], atol=1e-12)
    assert not estimate(batch_of([0.1] * 40, [i % 8 for i in range(40)])).any()


def test_the_whole_range_is_the_mean_up_to_a_constant():
    rewards = [0.0, 1.0, 0.25, 3.0]
    got = MixedValueAtRisk(0.0, 1.0)(batch_of(rewards))
    np.testing.assert_allclose(got, np.asarray(rewards) - 3.0)


def test_tracked_quantiles_move_when_a_step_was_trained_and_are_saved():
    estimate, batch = MixedValueAtRisk(0.25, 0.5, track=0.1), batch_of([0.0, 1.0, 2.0, 3.0])
    first = estimate(batch)
    np.testing.assert_array_equal(estimate(batch), first)  # a step that is done again
    estimate.observe({})
    # quantiles 0.75 and 1.5: shares below 1/4 and 1/2 hit the levels, so they stay; then one more batch moves them
    np.testing.assert_allclose(estimate.state_dict()["quantiles"], [0.75, 1.5])
    estimate(batch_of([0.0, 0.0, 1.0, 2.0]))
    estimate.observe({})
    np.testing.assert_allclose(
        estimate.state_dict()["quantiles"], [0.75 + 0.1 * (0.25 - 0.5), 1.5 + 0.1 * (0.5 - 0.75)]
    )
    again = MixedValueAtRisk(0.25, 0.5, track=0.1)
    again.load_state_dict(estimate.state_dict())
    np.testing.assert_array_equal(again(batch), estimate(batch))
    assert (again(batch) != first).any()


def test_risk_edges():
    estimate = MixedValueAtRisk()
    assert estimate(batch_of([])).shape == (0,)
    for rewards in ([math.nan] * 3, [1.0], [1.0, math.nan], [0.1] * 300):
        assert not estimate(batch_of(rewards)).any()
    for options in ({"lower": 0.9}, {"bundle": 0}, {"weight": -1.0}, {"track": 0.0}):
        with pytest.raises(ConfigError, match="mvar"):
            registry.build("advantage", {"name": "mvar", **options})
