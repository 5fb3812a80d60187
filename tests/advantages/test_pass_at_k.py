"""Pass@k, risk, the optimal token baseline and span scores against brute force, hand-worked numbers and what they
generalise."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from advantage_helpers import (
    PROMPT,
    assert_alone,
    assert_ordered,
    assert_sound,
    batch_of,
    cases,
    deviation,
    mean,
    members,
    of_case,
    spread,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.advantages import GroupAdvantage, OptimalTokenBaseline, PassAtK, SpanAdvantage
from rlvr.errors import ConfigError
from rlvr.recipes.riskpo.risk import MixedValueAtRisk
from rlvr.records import Segment, Verdict

# pass@k


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


# risk


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


# the optimal token baseline


def optimal_token(batch, case, tail):
    """Position by position."""
    rewards, groups, lengths = zip(*case, strict=True)
    logprobs, squares = (batch.token_columns[f"{n}/current"] for n in ("logprobs", "sum_squared_probs"))
    result = []
    for i, (r, _, length) in enumerate(case):
        values = []
        for t in range(length):
            if not math.isfinite(r):
                values.append(0.0)
                continue
            reach = [j for j in members(rewards, groups, i) if lengths[j] > t]
            if len(reach) == 1:
                values.append(r if tail == "reward" else 0.0)
                continue
            w = {
                j: sum(
                    max(0.0, 1 - 2 * math.exp(logprobs[j][PROMPT + u]) + squares[j][PROMPT + u]) for u in range(t + 1)
                )
                for j in reach
            }
            if sum(w.values()) == 0:  # no token has a gradient: all count alike
                w = dict.fromkeys(reach, 1.0)
            values.append(r - sum(w[j] * rewards[j] for j in reach) / sum(w.values()))
        result.append(values)
    return result


@pytest.mark.parametrize("tail", ["reward", "none"])
@given(case=cases, data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_optimal_token_baseline_equals_a_loop(tail, case, data):
    batch, estimate = of_case(case), OptimalTokenBaseline(tail)
    got = estimate(batch)
    assert_sound(batch, got)
    for values, want in zip(spread(batch, got), optimal_token(batch, case, tail), strict=True):
        np.testing.assert_allclose(values, want, rtol=1e-9, atol=1e-9)
    order = data.draw(st.permutations(range(len(case))))
    assert_ordered(estimate, batch, order)
    assert_alone(estimate, batch, batch_of([5.0, -2.0, math.nan], [8, 8, 9]))


def test_the_optimal_token_baseline_with_equal_weights_is_the_mean():
    batch = batch_of([1.0, 0.0, 0.0, 1.0, 0.1, 0.1, 0.1], [0, 0, 0, 0, 1, 1, 1], [3] * 7)
    for name, value in (("logprobs", -1.0), ("sum_squared_probs", 0.3)):
        batch.token_columns[f"{name}/current"] = [np.where(r.sampled, value, np.nan) for r in batch.rollouts]
    got, plain = OptimalTokenBaseline()(batch), GroupAdvantage("mean", "none")(batch)
    for values, a in zip(spread(batch, got), plain, strict=True):
        np.testing.assert_allclose(values, a, atol=1e-12)
        assert a != 0 or not any(values)


def test_the_optimal_token_baseline_at_certainty_and_edges():
    batch = batch_of([1.0, 0.0], lengths=[2, 2])
    for name, value in (("logprobs", 0.0), ("sum_squared_probs", 1.0)):  # no gradient at all: the plain mean
        batch.token_columns[f"{name}/current"] = [np.where(r.sampled, value, np.nan) for r in batch.rollouts]
    assert spread(batch, OptimalTokenBaseline()(batch)) == [[0.5, 0.5], [-0.5, -0.5]]
    for rewards, lengths in (([], []), ([math.nan] * 2, [3, 3]), ([1.0, 1.0], [0, 0])):
        empty = batch_of(rewards, lengths=lengths)
        assert not any(any(v) for v in spread(empty, OptimalTokenBaseline()(empty)))


# scores of spans


def with_spans(batch, spans, widths=2):
    """Verdicts with these (start, end, score) spans; every sampled token is `widths` characters long."""
    for rollout, scored in zip(batch.rollouts, spans, strict=True):
        rollout.char_ends = np.where(rollout.sampled, (np.cumsum(rollout.sampled)) * widths, -1)
        rollout.verdicts["v"] = dataclasses.replace(Verdict.from_score(0.5), spans=tuple(scored))
    return batch


def process(**options):
    return SpanAdvantage(outcome="none", normalise="none", **options)


SPANS = [(0, 4, 0.8), (4, 6, 0.2), (6, 10, 0.5)]
"""Over five tokens of two characters: tokens 0 and 1, token 2, tokens 3 and 4."""


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [1.5, 1.5, 0.7, 0.5, 0.5]),
        ({"discount": 0.5}, [0.8 + 0.1 + 0.125, 0.8 + 0.1 + 0.125, 0.2 + 0.25, 0.5, 0.5]),
        ({"transform": ("delta",)}, [0.8, 0.8, 0.2, 0.5, 0.5]),
        ({"transform": ("clip",), "threshold": 0.6}, [-0.5, -0.5, -0.5, -0.1, -0.1]),
        ({"transform": ("clip", "delta"), "threshold": 0.6}, [0, 0, -0.4, -0.1, -0.1]),
        ({"weight": 2.0, "discount": 0.0}, [1.6, 1.6, 0.4, 1.0, 1.0]),
    ],
)
def test_returns_to_go_by_hand(options, want):
    batch = with_spans(batch_of([1.0], lengths=[5]), [SPANS])
    np.testing.assert_allclose(spread(batch, process(**options)(batch))[0], want, atol=1e-12)


def test_more_steps_never_pay_under_clip_and_delta():
    """The exploit that they are for: repeating a right step."""
    few = with_spans(batch_of([1.0], lengths=[4]), [[(0, 4, 0.9), (4, 8, 0.9)]])
    many = with_spans(batch_of([1.0], lengths=[40]), [[(i, i + 4, 0.9) for i in range(0, 80, 4)]])
    for options in ({"transform": ("clip",), "threshold": 0.5}, {"transform": ("delta",)}):
        first = [spread(b, process(**options)(b))[0][0] for b in (few, many)]
        assert first[1] <= first[0] + 1e-9
    first = [spread(b, process()(b))[0][0] for b in (few, many)]
    assert first[1] > first[0]


def test_spans_are_normalised_over_the_steps_of_a_group():
    """Four steps of scores 1, 0 | 0, 1: mean 1/2, deviation 1/2; the outcomes 1, 0 likewise."""
    batch = with_spans(batch_of([1.0, 0.0], lengths=[2, 2]), [[(0, 2, 1.0), (2, 4, 0.0)], [(0, 2, 0.0), (2, 4, 1.0)]])
    got = spread(batch, SpanAdvantage(epsilon=0.0)(batch))
    np.testing.assert_allclose(got, [[1 - 1 + 1, -1 + 1], [-1 + 1 - 1, 1 - 1]], atol=1e-12)
    # outcome on the last step: rewards 1, 1 | 0, 1 with mean 3/4
    last = spread(batch, SpanAdvantage(outcome="last", normalise="mean", discount=0.5)(batch))
    np.testing.assert_allclose(last, [[0.25 + 0.125, 0.25], [-0.75 + 0.125, 0.25]], atol=1e-12)


@given(case=cases, data=st.data())
@settings(max_examples=30, deadline=None)
def test_without_spans_it_is_the_group_advantage_on_every_token(case, data):
    batch = of_case(case)
    want = spread(batch, GroupAdvantage()(batch))
    for estimate in (SpanAdvantage(), SpanAdvantage(outcome="last"), SpanAdvantage(kind="turn")):
        got = estimate(batch)
        assert_sound(batch, got)
        for a, b in zip(spread(batch, got), want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)
    scored = [[(0, 2, float(i)), (2, 3, 0.5)] for i in range(len(case))]
    with_spans(batch, scored)
    for estimate in (SpanAdvantage(), SpanAdvantage(transform=("delta",), discount=0.9, outcome="last")):
        assert_sound(batch, estimate(batch))
        assert_ordered(estimate, batch, data.draw(st.permutations(range(len(case)))))
        assert_alone(estimate, batch, with_spans(batch_of([5.0, -2.0, math.nan], [8, 8, 9]), [SPANS, [], SPANS]))


def test_spans_by_segment_and_spans_that_fit_nothing():
    batch = with_spans(batch_of([1.0], lengths=[5]), [[*SPANS, (0, 3, 0.25), (8, 99, 0.125), (1, 2, math.nan)]])
    rollout = batch.rollouts[0]
    rollout.segments = [
        Segment("turn", PROMPT, PROMPT + 3),
        Segment("think", 0, 1),
        Segment("turn", PROMPT + 4, PROMPT + 5),
    ]
    # 0.8 + 0.2 + 0.25 end in the first turn, 0.5 + 0.125 in the second
    got = spread(batch, process(kind="turn", discount=0.0)(batch))[0]
    np.testing.assert_allclose(got, [1.25, 1.25, 1.25, 0.625, 0.625])
    rollout.char_ends = None  # nothing says where characters are: all spans end with the response
    got = spread(batch, process(discount=0.0)(batch))[0]
    np.testing.assert_allclose(got, [0.8] * 5)
    assert SpanAdvantage().smallest_group == 2
    assert process().smallest_group == 1
