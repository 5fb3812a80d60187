"""pass@k and maj@k against exact enumeration, and intervals against all resamples."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlvr.evaluation import interquartile_mean, interval, majority_at_k, pass_at_k


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
@settings(max_examples=150, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(numbers):
    n, correct, k = numbers
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(float(Fraction(sum(map(any, subsets)), len(subsets))), abs=1e-12)


def test_pass_at_k_of_many_samples_is_exact():
    exact = 1 - Fraction(comb(10000 - 37, 500), comb(10000, 500))
    assert pass_at_k(10000, 37, 500) == pytest.approx(float(exact), rel=1e-9)
    assert pass_at_k(10000, 1, 1) == pytest.approx(1e-4)
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 8, 1) == 1.0


@pytest.mark.parametrize("k", [0, 5, -1])
def test_k_must_fit_the_samples(k):
    with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from 4 samples"):
        pass_at_k(4, 2, k)
    with pytest.raises(ValueError, match=f"maj@{k} cannot be estimated from 4 samples"):
        majority_at_k(["a"] * 4, [True] * 4, k)


def vote(answers, correct) -> Fraction:
    """The chance that a uniformly chosen winner of the vote is correct."""
    votes = {a: sum(b == a for b in answers) for a in answers if a is not None}
    winners = [a for a, count in votes.items() if count == max(votes.values())]
    right = {a for a, ok in zip(answers, correct, strict=True) if ok}
    return Fraction(sum(a in right for a in winners), len(winners)) if winners else Fraction(0)


# an answer is right or wrong whoever gives it; no answer is wrong
samples = st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7)


@given(samples, st.sets(st.sampled_from(["1", "2", "3"])))
@settings(max_examples=150, deadline=None)
def test_majority_of_all_samples_is_the_vote(answers, right):
    correct = [a in right for a in answers]
    assert majority_at_k(answers, correct, len(answers)) == pytest.approx(float(vote(answers, correct)))


@given(samples.filter(lambda a: len(a) > 1), st.sets(st.sampled_from(["1", "2", "3"])), st.data())
@settings(max_examples=40, deadline=None)
def test_majority_of_some_samples_estimates_the_mean_over_subsets(answers, right, data):
    correct = [a in right for a in answers]
    k = data.draw(st.integers(1, len(answers) - 1))
    pairs = list(itertools.combinations(zip(answers, correct, strict=True), k))
    exact = sum(vote(*zip(*pair, strict=True)) for pair in pairs) / len(pairs)
    # 64 subsets: the standard error is at most 1/16; five of them
    assert majority_at_k(answers, correct, k) == pytest.approx(float(exact), abs=5 / 16)
    many = [majority_at_k(answers, correct, k, seed=seed) for seed in range(30)]
    assert sum(many) / len(many) == pytest.approx(float(exact), abs=5 / 16 / 30**0.5)


def test_the_estimate_is_the_same_every_time():
    answers, correct = ["1", "2", "1", "3", None], [True, False, True, False, False]
    assert majority_at_k(answers, correct, 3) == majority_at_k(answers, correct, 3)


def test_ties_count_by_their_share_of_correct_answers():
    assert majority_at_k(["1", "2"], [True, False], 2) == 0.5
    assert majority_at_k(["1", "2", "3"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert majority_at_k(["1", "2", "2", "1", "3"], [True, False, False, True, False], 5) == 0.5


def test_samples_without_an_answer_do_not_vote():
    assert majority_at_k([None, None, "1"], [False, False, True], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0


def test_answers_that_are_the_same_vote_together():
    answers, correct = ["0.5", "1/2", "2", "2", "0.50"], [True, True, False, False, True]
    assert majority_at_k(answers, correct, 5) == 0.0
    assert majority_at_k(answers, correct, 5, same=lambda a, b: Fraction(a) == Fraction(b)) == 1.0
    # as the mathematics verifier compares them
    from rlvr.verifiers import MathVerifier

    assert (
        majority_at_k(
            ["1,000", "1000", "7", "7", "1000.0"], [True, True, False, False, True], 5, MathVerifier().same_answer
        )
        == 1.0
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 100])
def test_the_interquartile_mean_is_the_trimmed_mean(count):
    values = np.random.default_rng(count).normal(size=count)
    assert float(interquartile_mean(values)) == pytest.approx(stats.trim_mean(values, 0.25))


def test_the_interval_is_that_of_all_resamples():
    values = np.asarray([0.0, 0.1, 0.5, 1.0])
    means = [np.mean(chosen) for chosen in itertools.product(values, repeat=4)]
    got = interval(values, resamples=60_000)
    assert got is not None
    np.testing.assert_allclose(got, np.quantile(means, [0.025, 0.975]), atol=0.026)


def test_an_interval_covers_as_often_as_it_says():
    random = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        low, high = interval((random.random(60) < 0.3).astype(float), resamples=400, seed=trial) or (1, 0)
        covered += low <= 0.3 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_the_intervals_of_nothing_and_of_runs():
    assert interval(np.asarray([np.nan])) is None
    assert interval(np.asarray([0.5, np.nan, 0.5])) == (0.5, 0.5)
    runs = np.stack([np.zeros(20), np.ones(20)])  # the runs differ, the tasks do not
    low, high = interval(runs) or (0, 0)
    assert low < 0.42 and high > 0.58
    assert interval(np.full((3, 5), 0.25)) == (0.25, 0.25)
