"""Calibration, ranking and correlation against numbers by hand, scikit-free loops and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, spearmanr

from rlvr.evaluation.calibration import brier_score, calibration_error, rank_correlation, ranking_auc

POINTS = st.lists(st.tuples(st.integers(0, 20).map(lambda n: n / 20), st.booleans()), min_size=2, max_size=40)


def arrays(points):
    return np.asarray([score for score, _ in points]), np.asarray([float(right) for _, right in points])


def test_by_hand():
    scores = np.asarray([0.0, 0.1, 0.15, 0.95, 1.0])
    right = np.asarray([0.0, 1.0, 0.0, 1.0, 1.0])
    # Bins: {0, 0.1} of (0, 0.1], {0.15} of (0.1, 0.2], {0.95, 1} of (0.9, 1].
    expected = (2 / 5) * abs(0.5 - 0.05) + (1 / 5) * abs(0 - 0.15) + (2 / 5) * abs(1 - 0.975)
    assert calibration_error(scores, right) == pytest.approx(expected)
    assert brier_score(scores, right) == pytest.approx((0 + 0.81 + 0.0225 + 0.0025 + 0) / 5)
    # Of the six pairs of a right and a wrong one: 0.1 beats 0 and loses to 0.15, the others win.
    assert ranking_auc(scores, right) == pytest.approx(5 / 6)


def test_a_constant_has_no_rank_and_ties_are_half():
    assert ranking_auc(np.asarray([0.5, 0.5]), np.asarray([1.0, 0.0])) == 0.5
    assert ranking_auc(np.asarray([0.5, 0.7]), np.asarray([1.0, 1.0])) is None
    assert rank_correlation(np.asarray([1.0, 1.0]), np.asarray([1.0, 2.0])) is None


@given(POINTS)
def test_the_calibration_error_is_that_of_a_loop_over_bins(points):
    scores, right = arrays(points)
    error = 0.0
    for m in range(10):
        # In twentieths, so that no bound is rounded.
        inside = [i for i, s in enumerate(scores) if 2 * m < round(20 * s) <= 2 * m + 2 or (m == 0 and s == 0)]
        if inside:
            error += len(inside) / len(scores) * abs(right[inside].mean() - scores[inside].mean())
    assert calibration_error(scores, right) == pytest.approx(error)


@given(POINTS)
def test_the_ranking_and_the_correlation_are_scipys(points):
    scores, right = arrays(points)
    if 0 < right.sum() < len(right):
        u = mannwhitneyu(scores[right > 0], scores[right == 0]).statistic
        assert ranking_auc(scores, right) == pytest.approx(u / (right.sum() * (1 - right).sum()))
    other = np.asarray([(7 * i) % 5 for i in range(len(scores))], dtype=float)
    if len(set(scores)) > 1 and len(set(other)) > 1:
        assert rank_correlation(scores, other) == pytest.approx(spearmanr(scores, other).statistic)
