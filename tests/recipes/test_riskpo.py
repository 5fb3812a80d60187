"""RiskPO: the advantages of bundles at the recipe's own setting, by a loop over papers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch

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
