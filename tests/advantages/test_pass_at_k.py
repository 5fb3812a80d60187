"""Pass@k against all subsets of a group, the paper's closed form, and GRPO, which it generalises."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage_helpers import (
    assert_alone,
    assert_ordered,
    assert_sound,
    batch_of,
    cases,
    deviation,
    mean,
    members,
    of_case,
)
from rlvr import registry
from rlvr.advantages import GroupAdvantage, PassAtK
from rlvr.errors import ConfigError


def pass_at_k(rewards, groups, k, baseline, scale, epsilon):
    """Every k-subset of every group, one by one."""
    result = []
    for i, r in enumerate(rewards):
        group = members(rewards, groups, i)
        values = [rewards[j] for j in group]
        if not math.isfinite(r) or max(values) == min(values):
            result.append(0.0)
            continue
        subsets = list(itertools.combinations(group, min(k, len(group))))
        best = [max(rewards[j] for j in s) for s in subsets]
        mine = [s for s in subsets if i in s]
        if baseline == "mean":
            a = mean([max(rewards[j] for j in s) for s in mine]) - mean(best)
            spread_of = best
        else:
            a = mean([max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in mine])
            spread_of = values
        result.append(a / (deviation(spread_of) + epsilon) if scale == "std" else a)
    return result


@pytest.mark.parametrize(("baseline", "scale"), itertools.product(("mean", "leave_one_out"), ("std", "none")))
@given(case=cases, k=st.integers(2, 6), data=st.data())
@settings(max_examples=25, deadline=None)
def test_pass_at_k_equals_all_subsets(baseline, scale, case, k, data):
    batch, estimate = of_case(case), PassAtK(k, baseline, scale, 1e-2)
    rewards, groups, _ = zip(*case, strict=True)
    got = estimate(batch)
    assert_sound(batch, got)
    np.testing.assert_allclose(got, pass_at_k(rewards, groups, k, baseline, scale, 1e-2), rtol=1e-9, atol=1e-9)
    assert_ordered(estimate, batch, data.draw(st.permutations(range(len(case)))))
    assert_alone(estimate, batch, batch_of([5.0, -2.0, math.nan], [8, 8, 9]))


@given(case=cases)
@settings(max_examples=25, deadline=None)
def test_pass_at_1_is_grpo(case):
    batch = of_case(case)
    np.testing.assert_allclose(PassAtK(1)(batch), GroupAdvantage()(batch), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        PassAtK(1, scale="none")(batch), GroupAdvantage("mean", "none")(batch), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("n", "right", "k"), [(8, 2, 4), (4, 1, 2), (16, 5, 3), (512, 3, 64)])
def test_pass_at_k_by_the_papers_closed_form(n, right, k):
    """Chen et al. 2025, eq. 11 to 15, for rewards 0 and 1."""
    fails = math.comb(n - right, k) / math.comb(n, k)
    sigma = math.sqrt((1 - fails) * fails)
    got = PassAtK(k, epsilon=1e-12)(batch_of([1.0] * right + [0.0] * (n - right)))
    np.testing.assert_allclose(got[0], fails / sigma, rtol=1e-8)
    wrong = (fails - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma
    np.testing.assert_allclose(got[-1], wrong, rtol=1e-6)


def test_best_minus_second():
    batch = batch_of([0.2, 0.9, 0.5, math.nan, 1.0, 1.0], [0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(PassAtK(3, "leave_one_out", "none")(batch), [0, 0.4, 0, 0, 0, 0])
    np.testing.assert_allclose(
        PassAtK(3, "leave_one_out", "std", 0.0, unbiased=True)(batch)[1], 0.4 / deviation([0.2, 0.9, 0.5], True)
    )


def test_pass_at_k_edges():
    for estimate in (PassAtK(4), PassAtK(4, "leave_one_out", "none")):
        assert estimate(batch_of([])).shape == (0,)
        for rewards in ([math.nan] * 3, [1.0], [1.0, math.nan], [0.1] * 300):
            assert not estimate(batch_of(rewards)).any()
        assert_sound(b := batch_of(np.random.default_rng(0).choice([0.0, 1.0], 999)), estimate(b))
    assert not PassAtK(4)(batch_of([1.0, 1.0, 0.0, 0.0, 0.0])).any(), "with 3 wrong ones every 4 hold a right one"
    assert PassAtK(5).smallest_group == 5
    for options in ({"k": 0}, {"k": 1, "baseline": "leave_one_out"}):
        with pytest.raises(ConfigError, match="pass_at_k"):
            registry.build("advantage", {"name": "pass_at_k", **options})


# scores of spans
