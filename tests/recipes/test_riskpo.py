"""RiskPO: the advantage of bundles of five questions at the recipe's setting, by loops over papers."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from rlvr import registry
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch

LOWER, UPPER, WEIGHT, SIZE = 0.2, 0.8, 1.5, 5
"""quantile_down, quantile_up, w_mix and bundle_size of scripts/run_qwen2.5_1.5b_MVaR_dapomath.sh"""


@pytest.fixture
def batch_of(make_rollout):
    def make(questions):
        rollouts = [
            make_rollout([9, 1], prompt=1, group=f"g{g}", member=m)
            for g, rewards in enumerate(questions)
            for m in range(len(rewards))
        ]
        return Batch(rollouts, {"reward": np.asarray([r for rewards in questions for r in rewards])})

    return make


def estimator():
    return registry.build("advantage", find_paper("riskpo").config.algorithm.advantage)


def of_the_authors(questions, low, high):
    """Track mode, mixing, sum-mean credit, over the standard deviation, without the natural baseline; on sums."""
    result = [[0.0] * len(rewards) for rewards in questions]
    for start in range(0, len(questions), SIZE):
        bundle = questions[start : start + SIZE]
        papers = [math.fsum(question[i] for question in bundle) for i in range(len(bundle[0]))]
        spread = statistics.stdev(papers)
        for i, score in enumerate(papers):
            middle = (max(score - low, 0) - max(score - high, 0)) / (UPPER - LOWER)
            tail = -max(low - score, 0) / LOWER
            advantage = (WEIGHT * tail + middle) / (WEIGHT + 1) / (spread if spread > 0 else 1.0)
            above = [question[i] - statistics.fmean(question) for question in bundle]
            for q, ratio in enumerate(above):
                total = math.fsum(above)
                share = ratio / total if abs(total) > 1e-6 else 1 / len(bundle)
                result[start + q][i] = advantage * share
    return [value for values in result for value in values]


def scores_of(questions):
    return [
        math.fsum(question[i] for question in questions[start : start + SIZE])
        for start in range(0, len(questions), SIZE)
        for i in range(len(questions[start]))
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_shipped_advantage_equals_a_loop_on_sums(batch_of, seed):
    rng = np.random.default_rng(seed)
    estimate, track = estimator(), None
    for _ in range(3):
        questions = [rng.binomial(1, rate, 10).astype(float).tolist() for rate in rng.random(15)]
        papers = scores_of(questions)
        # The quantiles of the first batch, then steps of 0.1 on sums.
        track = np.quantile(papers, [LOWER, UPPER]) if track is None else track
        got = estimate(batch_of(questions))
        expected = of_the_authors(questions, *track)
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-9)
        below = [statistics.fmean(score < q for score in papers) for q in track]
        track = track + 0.1 * (np.asarray([LOWER, UPPER]) - below)
        estimate.observe({})


def test_the_lower_tail_weighs_most_and_the_best_papers_are_not_pushed_further():
    """Of papers with 0 to 5 right, tracked quantiles 1 and 4: from 0 to 1 right an advantage grows by 1.5 / 0.2 = 7.5
    against 1 / 0.6 for each further one up to 4; above there is no difference. Both signs occur."""
    estimate = estimator()
    values = estimate._risk(np.arange(6) / 5, np.full(6, 1 / 5), np.full(6, 4 / 5)) * SIZE * (WEIGHT + 1)
    np.testing.assert_allclose(np.diff(values), [7.5, 1 / 0.6, 1 / 0.6, 1 / 0.6, 0], rtol=1e-9)
    assert values[0] < 0 < values[-1]


def test_the_shares_of_a_paper_sum_to_one(batch_of):
    """The only right answer of its question has most of the credit; questions that all get right have none."""
    questions = [[1.0, 1.0, 1.0, 1.0]] * 4 + [[1.0, 0.0, 0.0, 0.0]]
    shares = np.asarray(estimator()(batch_of(questions))).reshape(5, 4)
    np.testing.assert_allclose(shares[:4], 0, atol=1e-12)
    assert shares[4, 0] != 0
