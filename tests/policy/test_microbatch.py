"""Rollouts cut to a budget and dealt to ranks: pure functions of lengths and costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.policy.attention.packed_rows import Shared, runs_of
from rlvr.policy.load_balancing import deal
from rlvr.policy.microbatch import cut, cut_shared


def shared(cluster, prefix):
    """Rollouts that begin with what all of their cluster begin with."""
    return Shared(cluster, [[(c, p)] if p else [] for c, p in zip(cluster.tolist(), prefix.tolist(), strict=True)])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 1, 3, 8]), st.sampled_from([None, 1, 20, 64]))
def test_cuts_keep_the_budget_and_every_rollout(seed, size, budget):
    rng = np.random.default_rng(seed)
    cluster = np.sort(rng.integers(0, 4, int(rng.integers(0, 20))))
    cluster = np.unique(cluster, return_inverse=True)[1]
    prefix = rng.integers(0, 9, 5)[cluster]
    lengths = prefix + rng.integers(1, 30, len(cluster))
    if budget is not None and size is not None:
        size = None  # the two exclude each other
    parts = cut_shared(lengths, shared(cluster, prefix), size, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    computed = [
        int((lengths - prefix)[part].sum() + sum({cluster[i]: prefix[i] for i in part}.values())) for part in parts
    ]
    for part, tokens in zip(parts, computed, strict=True):
        assert size is None or len(part) <= size
        assert budget is None or tokens <= budget or len(part) == 1
        assert len(list(itertools.groupby(cluster[part]))) == len(set(cluster[part]))  # clusters lie together
    # greedy: the first of a part did not fit into the one before
    for before, after, tokens in zip(parts, parts[1:], computed, strict=False):
        first = after[0]
        extra = lengths[first] - (prefix[first] if cluster[first] == cluster[before[-1]] else 0)
        assert (size is not None and len(before) == size) or (budget is not None and tokens + extra > budget)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 40, 90]), st.lists(st.integers(2, 40), min_size=1, max_size=2))
def test_keys_that_windows_copy_are_within_the_budget(seed, budget, windows):
    rng = np.random.default_rng(seed)
    cluster = np.unique(np.sort(rng.integers(0, 3, int(rng.integers(1, 20)))), return_inverse=True)[1]
    prefix = rng.integers(1, 30, 5)[cluster]
    lengths = prefix + rng.integers(1, 10, len(cluster))
    rollouts = shared(cluster, prefix)
    parts = cut_shared(lengths, rollouts, None, budget, windows)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        spans = runs_of(lengths[part], rollouts.select(part), torch.device("cpu")).spans
        keys = max(int(call.key_length.sum()) for window in windows for call in spans.segments(window))
        apart = lengths.sum() + sum({cluster[i]: prefix[i] for i in part}.values())
        assert keys <= (budget or apart) or len(part) == 1
    # Of a prompt of 4,000 tokens with 240 responses of 256, which are 65,440 tokens: 16 have the keys of 65,536.
    many = shared(np.zeros(240, dtype=np.int64), np.full(240, 4000))
    assert [len(part) for part in cut_shared(np.full(240, 4256), many, None, 1 << 16)] == [240]
    parts = cut_shared(np.full(240, 4256), many, None, 1 << 16, [4096])
    assert {len(part) for part in parts[:-1]} == {14}


def test_longest_first():
    lengths = np.asarray([3, 9, 5, 9, 1])
    assert [part.tolist() for part in cut(lengths, 2, None)] == [[1, 3], [2, 0], [4]]
    assert [part.tolist() for part in cut(lengths, None, 10)] == [[1], [3], [2, 0, 4]]
    cluster, prefix = np.asarray([0, 1, 0, 1, 2]), np.asarray([2, 4, 2, 4, 0])
    assert [part.tolist() for part in cut_shared(lengths, shared(cluster, prefix), None, 14)] == [[1, 3], [2, 0, 4]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_a_deal_is_whole_and_balanced(seed, world):
    rng = np.random.default_rng(seed)
    costs = rng.exponential(10.0, int(rng.integers(0, 40)))
    hands = deal(costs, world)
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    assert len(hands) == world
    totals = [costs[hand].sum() for hand in hands]
    # Graham's bound for list scheduling, of which longest-first is a case
    assert max(totals) <= costs.sum() / world + costs.max(initial=0.0) * (1 - 1 / world) + 1e-9
    assert all(np.array_equal(a, b) for a, b in zip(hands, deal(costs, world), strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_a_deal_by_hand(world):
    want = {2: [[0, 3, 4], [1, 2]], 3: [[0], [1, 4], [2, 3]]}
    assert [hand.tolist() for hand in deal(np.asarray([7.0, 6.0, 5.0, 4.0, 3.0]), world)] == want[world]
