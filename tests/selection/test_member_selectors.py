"""Selectors of members of groups against choices worked by hand, and what holds for every selector."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.errors import ConfigError
from selector_helpers import NAN, batch_of, kept


def test_best_and_worst():
    batch = batch_of([0.3, 0.9, NAN, 0.1, 0.9, 0.5], [1, 0])
    assert kept("best_worst", batch, best=1, worst=1) == [3, 4, 6, 7]  # of the two best the later member
    assert kept("best_worst", batch, best=2, worst=0) == [1, 4, 6, 7]
    assert kept("best_worst", batch, best=0, worst=2) == [0, 3, 6, 7]
    assert kept("best_worst", batch, best=3, worst=2) == [0, 1, 3, 4, 5, 6, 7]
    assert kept("best_worst", batch, best=1, worst=0, column="advantage") == [3, 7]
    with pytest.raises(ConfigError, match="at least 0"):
        kept("best_worst", batch, best=0, worst=0)


@pytest.mark.parametrize("seed", range(40))
def test_the_most_varied_members_have_the_largest_variance_of_all_subsets(seed):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 1.0, 0.5, rng.random()], int(rng.integers(1, 9)))
    keep = int(rng.integers(1, 6))
    chosen = rewards[kept("most_varied", batch_of(rewards), keep=keep)]
    assert len(chosen) == min(keep, len(rewards))
    best = max(np.var(subset) for subset in itertools.combinations(rewards, min(keep, len(rewards))))
    assert np.var(chosen) == pytest.approx(best, abs=1e-9)


def test_the_most_varied_of_a_wide_group():
    batch = batch_of([1.0] * 30 + [0.0] * 270 + [NAN])
    chosen = kept("most_varied", batch, keep=10)
    assert sum(i < 30 for i in chosen) == 5
    assert len(chosen) == 10


def test_the_shortest_right_ones_and_all_wrong_ones():
    batch = batch_of([1, 0, 1, 1, NAN], [0, 0], lengths=[9, 3, 2, 5, 1, 4, 1])
    assert kept("shortest", batch, keep=1) == [1, 2, 6]  # in the second group all have the highest reward
    assert kept("shortest", batch, keep=2, right_only=False) == [1, 2, 5, 6]
    assert kept("shortest", batch, keep=9) == [0, 1, 2, 3, 5, 6]


def test_sources_in_balance():
    groups = [[1, 0], [1, 1], [1, 0, 0, 0], [0, 1], [1, 1]]
    batch = batch_of(*groups, sources=["a", "a", "a", "b", "b"])
    assert kept("balance_sources", batch) == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]  # of a the two that vary most
    three = batch_of(*groups[:4], sources=["a", "a", "a", "b"])
    assert kept("balance_sources", three) == [0, 1, 8, 9]
    assert kept("balance_sources", three, most=2) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert kept("balance_sources", batch_of(*groups)) == list(range(12))


def test_outcomes_in_balance():
    batch = batch_of([1, 0, 0, 0.2, NAN], [1, 1], [1, 1, 0.8, 0])
    assert kept("balance_outcomes", batch) == [
        0,
        1,
        5,
        6,
        8,
        10,
    ]  # the worst wrong one, the best right one (later member)
    assert kept("balance_outcomes", batch, most=2) == [0, 1, 2, 5, 6, 7, 8, 10]


def test_as_many_of_each_group_go_so_that_outcomes_are_even():
    """Right 3 and wrong 1; right alone; wrong 2 and right 1; fewer than go. A value of the column is the rank."""
    batch = batch_of([1, 1, 0, 1], [1, 1, 1], [0, 1, 0], [1], [NAN, 1, 0, 0])
    batch.columns["reward/process"] = np.asarray([0.9, 0.1, 0.8, 0.5, 0.3, 0.2, 0.4, 0.6, 0.5, 0.7, 1, 0, 0, NAN, 0.5])
    options = {"column": "reward/process", "remove": 2}
    # Of the right ones those with high values stay, of the wrong ones those with low ones; undecided ones go first.
    assert kept("balance_outcomes", batch, **options) == [0, 2, 6, 8]
    assert kept("balance_outcomes", batch, column="reward/process", remove=1) == [0, 2, 3, 4, 6, 7, 8, 12]
    with pytest.raises(ConfigError, match="remove is 0"):
        kept("balance_outcomes", batch, remove=0)


@pytest.mark.parametrize("name", registry.names("selector"))
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_the_order_of_rollouts_does_not_matter(name, seed):
    rng = np.random.default_rng(seed)
    groups = [rng.choice([0.0, 1.0, 0.3, NAN], int(rng.integers(1, 8))) for _ in range(4)]
    lengths = rng.integers(0, 9, sum(map(len, groups)))
    batch = batch_of(*groups, lengths=lengths, sources=rng.choice(["a", "b"], 4))
    order = rng.permutation(len(batch))
    assert sorted(order[kept(name, batch.select(order))]) == sorted(kept(name, batch))
    chosen = kept(name, batch)
    assert len(set(chosen)) == len(chosen)
    if name not in (
        "mixed_groups",
        "pass_rate_band",
        "balance_sources",
        "spread",
    ):  # whole groups with their undecided members
        assert np.isfinite(batch.columns["reward"][chosen]).all()


@pytest.mark.parametrize("name", registry.names("selector"))
def test_nothing_one_and_all_undecided(name):
    assert kept(name, batch_of()) == []
    for batch in (batch_of([1.0]), batch_of([NAN, NAN]), batch_of([0.5] * 300)):
        assert set(kept(name, batch)) <= set(range(len(batch)))


# as the stage runs them


def test_a_limit_that_float64_writes_just_below_a_whole_number():
    groups = [[1.0, 0.0]] * 215
    sources = ["a"] * 115 + ["b"] * 100
    batch = batch_of(*groups, sources=sources)
    assert len(kept("balance_sources", batch, most=1.15)) == 2 * 215
