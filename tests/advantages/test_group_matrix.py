"""The matrix of baselines and scales against loops over the members, hand-worked numbers and each other."""

from __future__ import annotations

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
from rlvr.advantages import GroupAdvantage
from rlvr.errors import ConfigError

BASELINES = ("mean", "leave_one_out", "length_weighted", "batch_mean", "none", 0.5)
SCALES = ("std", "others_std", "batch_std", "none", 2.0)
OF_THE_GROUP = ("mean", "leave_one_out", "length_weighted")


def oracle(rewards, groups, lengths, baseline, scale, epsilon, unbiased):
    """Each rollout by itself."""
    everyone, result = [r for r in rewards if math.isfinite(r)], []
    for i, r in enumerate(rewards):
        if not math.isfinite(r):
            result.append(0.0)
            continue
        group = members(rewards, groups, i)
        peers, others = [rewards[j] for j in group], [rewards[j] for j in group if j != i]
        weight = sum(lengths[j] for j in group)
        if baseline == "mean" or (baseline == "length_weighted" and weight == 0):
            b = mean(peers)
        elif baseline == "leave_one_out":
            b = mean(others) if others else r
        elif baseline == "length_weighted":
            b = sum(lengths[j] * rewards[j] for j in group) / weight
        elif baseline == "batch_mean":
            b = mean(everyone)
        else:
            b = 0.0 if baseline == "none" else baseline
        a = r - b
        if baseline in OF_THE_GROUP and max(peers) == min(peers):
            a = 0.0
        if scale == "std" and max(peers) > min(peers):
            a /= deviation(peers, unbiased) + epsilon
        elif scale == "others_std" and len(others) > 1 and max(others) > min(others):
            a /= deviation(others, unbiased) + epsilon
        elif scale == "batch_std" and max(everyone) > min(everyone):
            a /= deviation(everyone, unbiased) + epsilon
        elif isinstance(scale, float):
            a /= scale
        result.append(a)
    return result


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@given(case=cases, unbiased=st.booleans(), data=st.data())
@settings(max_examples=12, deadline=None)
def test_equals_a_loop_over_the_members_in_any_order(baseline, scale, case, unbiased, data):
    batch, estimate = of_case(case), GroupAdvantage(baseline, scale, 1e-3, unbiased)
    rewards, groups, lengths = zip(*case, strict=True)
    got = estimate(batch)
    assert_sound(batch, got)
    np.testing.assert_allclose(
        got, oracle(rewards, groups, lengths, baseline, scale, 1e-3, unbiased), rtol=1e-9, atol=1e-9
    )
    assert_ordered(estimate, batch, data.draw(st.permutations(range(len(case)))))
    if baseline != "batch_mean" and scale != "batch_std":
        assert_alone(estimate, batch, batch_of([5.0, -2.0, math.nan], [8, 8, 9]))


def test_by_hand():
    rewards, groups, lengths = [1.0, 0.0, 0.0, 2.0, 4.0], [0, 0, 0, 1, 1], [4, 1, 1, 2, 2]
    batch = batch_of(rewards, groups, lengths)

    def got(*options, **more):
        return GroupAdvantage(*options, epsilon=0.0, **more)(batch)

    # OPO: (4 x 1) / 6 = 2/3, and 3
    np.testing.assert_allclose(got("length_weighted", "none"), [1 / 3, -2 / 3, -2 / 3, -1, 1])
    # the mean of the batch is 7/5; squares 0.16 + 1.96 x 2 + 0.36 + 6.76 = 11.2, over 5
    np.testing.assert_allclose(got("batch_mean", "none"), [-0.4, -1.4, -1.4, 0.6, 2.6])
    np.testing.assert_allclose(got("mean", "batch_std"), np.asarray([2 / 3, -1 / 3, -1 / 3, -1, 1]) / math.sqrt(2.24))
    np.testing.assert_allclose(got("mean", "batch_std", unbiased=True)[4], 1 / math.sqrt(2.8))
    np.testing.assert_allclose(got("mean", "std", unbiased=True)[3:], [-1 / math.sqrt(2), 1 / math.sqrt(2)])
    np.testing.assert_allclose(got(0.5, 0.5), [1, -1, -1, 3, 7])


def nemo(rewards):
    """calculate_baseline_and_std_per_prompt of NeMo-RL and the division behind it, of one prompt, in float64."""
    advantages = []
    for i, reward in enumerate(rewards):
        others = np.delete(np.asarray(rewards, dtype=np.float64), i)
        baseline = others.sum() / len(others)
        std = np.sqrt(max((others**2).sum() / len(others) - baseline**2, 0.0))
        advantages.append((reward - baseline) / std if std > 0 else reward - baseline)
    return advantages


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([0.0, *[-10.0] * 7], 10.0, -1 / math.sqrt(6)),  # one right of eight: nothing to divide it by
        ([-10.0, *[0.0] * 7], -10.0, 1 / math.sqrt(6)),
        # One without the form beside four right and three wrong: the others' mean is -30/7, their variance 1,200/49.
        ([-100.0, *[-10.0] * 3, *[0.0] * 4], -(670 / 7) / math.sqrt(1200 / 49), None),
        ([0.0, -10.0], 10.0, -10.0),
        ([-10.0] * 8, 0.0, 0.0),
    ],
)
def test_the_deviation_of_the_other_responses_is_nemos(rewards, first, last):
    got = GroupAdvantage("leave_one_out", "others_std", epsilon=0.0)(batch_of(rewards))
    np.testing.assert_allclose(got, nemo(rewards), rtol=1e-9, atol=1e-9)
    assert got[0] == pytest.approx(first, rel=1e-12)
    assert last is None or got[-1] == pytest.approx(last, rel=1e-12)


def test_baselines_that_are_given():
    """ReMax: the greedy response's reward. history: the group's mean on a prompt's first draw."""
    batch = batch_of([1.0, 0.0, 1.0, math.nan, 1.0], [0, 0, 1, 1, 2], baseline=[0.25, 0.25, 1.0, 1.0, math.nan])
    for name in ("greedy", "reference"):
        np.testing.assert_array_equal(GroupAdvantage(name, "none")(batch), [0.75, -0.25, 0.0, 0.0, 0.0])
    batch.columns["history/mean"] = np.asarray([math.nan, math.nan, 0.25, 0.25, 0.5])
    np.testing.assert_array_equal(GroupAdvantage("history", "none")(batch), [0.5, -0.5, 0.75, 0.0, 0.5])
    np.testing.assert_array_equal(GroupAdvantage("history", 0.5)(batch), [1.0, -1.0, 1.5, 0.0, 1.0])


@given(case=cases, weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)))
@settings(max_examples=40, deadline=None)
def test_rewards_normalised_one_by_one(case, weights):
    """GDPO is GRPO on each term; with one term of weight 1 it is GRPO."""
    batch = of_case(case)
    rewards = batch.columns["reward"]
    other = np.cos(np.arange(len(case)))
    batch.columns |= {"reward/a": rewards.copy(), "reward/b": other}
    plain = GroupAdvantage()
    np.testing.assert_array_equal(GroupAdvantage(per_reward={"a": 1.0})(batch), plain(batch))
    groups = [g for _, g, _ in case]
    want = weights[0] * np.asarray(oracle(rewards, groups, groups, "mean", "std", 1e-4, False)) + weights[
        1
    ] * np.asarray(oracle(np.where(np.isfinite(rewards), other, math.nan), groups, groups, "mean", "std", 1e-4, False))
    got = GroupAdvantage(per_reward={"a": weights[0], "b": weights[1]})(batch)
    assert_sound(batch, got)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_a_term_of_small_spread_counts_when_terms_are_normalised_apart():
    batch = batch_of([1.01, 1.0, 0.01, 0.0])
    batch.columns |= {"reward/a": np.asarray([1.0, 1, 0, 0]), "reward/b": np.asarray([0.01, 0, 0.01, 0])}
    apart = GroupAdvantage(per_reward={"a": 1.0, "b": 1.0}, epsilon=1e-9)(batch)
    np.testing.assert_allclose(apart, [2, 0, 0, -2], atol=1e-5)
    np.testing.assert_allclose(GroupAdvantage(epsilon=0.0)(batch), [1.01, 0.99, -0.99, -1.01], atol=1e-3)


@given(case=cases)
@settings(max_examples=40, deadline=None)
def test_neutral_settings(case):
    batch = of_case([(r, g, 4) for r, g, _ in case])
    equal_lengths = GroupAdvantage("length_weighted", "none")(batch)
    np.testing.assert_allclose(equal_lengths, GroupAdvantage("mean", "none")(batch), rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(GroupAdvantage(0.0, 1.0)(batch), GroupAdvantage("none", "none")(batch))
    one = of_case([(r, 0, n) for r, _, n in case])
    for scale in ("std", "batch_std"):
        got = GroupAdvantage("batch_mean", scale)(one)
        np.testing.assert_allclose(got, GroupAdvantage("mean", "std")(one), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_edge_cases(baseline, scale):
    estimate = GroupAdvantage(baseline, scale)
    own = baseline in (*OF_THE_GROUP, "batch_mean")
    assert estimate(batch_of([])).shape == (0,)
    assert not estimate(batch_of([math.nan] * 4, [0, 0, 1, 2])).any()
    alone = estimate(batch_of([0.75, math.nan]))
    assert alone[1] == 0
    assert alone[0] == (0 if own else (0.75 if baseline == "none" else 0.25) / (scale if scale == 2.0 else 1.0))
    same = estimate(batch_of([0.1] * 300, lengths=[0] * 300))
    assert np.ptp(same) == 0
    assert not (own and same.any())
    assert estimate.smallest_group == (2 if baseline in OF_THE_GROUP or scale in ("std", "others_std") else 1)
    big = np.random.default_rng(0).choice([0.0, 1.0], 700)
    assert_sound(batch_of(big), estimate(batch_of(big)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"per_reward": {"a": 1.0}, "baseline": "greedy"}, "per_reward normalises every term"),
        ({"scale": 0.0}, "above 0"),
        ({"scale": "sdt"}, "scale='sdt'"),
        ({"baseline": "median"}, "baseline='median'"),
    ],
)
def test_options_that_contradict_each_other(options, says):
    with pytest.raises(ConfigError, match=says):
        registry.build("advantage", {"name": "group", **options})


def test_options_as_a_configuration_writes_them():
    built = registry.build("advantage", {"name": "group", "baseline": 0.25, "scale": "batch_std"})
    assert built == GroupAdvantage(0.25, "batch_std")
    scheduled = {"name": "group", "baseline": {"schedule": "linear", "start": 0.0, "end": 1.0}, "scale": "none"}
    assert registry.build("advantage", scheduled).baseline.end == 1.0
