"""Group advantages against explicit loops, hand-computed cases and each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from number_oracles import group_advantages
from rlvr.advantages import GroupAdvantage, group_advantage
from rlvr.records import Batch
from rlvr.selection import decided, mixed_groups

METHODS = [(b, s) for b in ("mean", "leave_one_out", "none") for s in ("std", "none")]

reward = st.one_of(
    st.sampled_from([0.0, 1.0, 0.1, 0.5, -1.0, float("nan")]),
    st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3)),
)
cases = st.lists(st.tuples(reward, st.integers(0, 3)), min_size=1, max_size=14)


def numbered(groups):
    """Numbers in order of first appearance, as Batch.group_index gives them."""
    return np.asarray([list(dict.fromkeys(groups)).index(g) for g in groups])


@pytest.mark.parametrize(("baseline", "scale"), METHODS)
@given(case=cases)
@settings(max_examples=60, deadline=None)
def test_equals_a_loop_over_the_members(baseline, scale, case):
    rewards, groups = np.asarray([r for r, _ in case]), numbered([g for _, g in case])
    want = group_advantages(rewards.tolist(), groups.tolist(), baseline, scale, 1e-4)
    got = group_advantage(rewards, groups, baseline, scale)
    assert got.dtype == np.float64
    if baseline == "none" and scale == "std":  # a scale of zero has its own test
        spread = [np.unique(rewards[(groups == g) & np.isfinite(rewards)]).size != 1 for g in groups]
        got, want = got[spread], np.asarray(want)[spread]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("baseline", "scale"), METHODS)
@given(case=cases, data=st.data())
@settings(max_examples=40, deadline=None)
def test_order_and_other_groups_change_nothing(baseline, scale, case, data):
    rewards, groups = np.asarray([r for r, _ in case]), numbered([g for _, g in case])
    got = group_advantage(rewards, groups, baseline, scale)
    order = np.asarray(data.draw(st.permutations(range(len(case)))))
    shuffled = group_advantage(rewards[order], numbered(groups[order]), baseline, scale)
    np.testing.assert_allclose(shuffled, got[order], rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(shuffled == 0, got[order] == 0) if baseline != "none" else None
    more = np.concatenate([[5.0, -3.0, np.nan], rewards])
    alone = group_advantage(more, numbered([-1, -1, -1, *groups]), baseline, scale)[3:]
    np.testing.assert_array_equal(alone, got)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
@given(value=st.floats(-1e6, 1e6), count=st.integers(1, 40), missing=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_equal_rewards_give_exactly_zero(baseline, scale, value, count, missing):
    rewards = np.asarray([value] * count + [np.nan] * missing)
    got = group_advantage(rewards, np.zeros(len(rewards), dtype=int), baseline, scale)
    assert not got.any()


@pytest.mark.parametrize(("baseline", "scale"), [m for m in METHODS if m[0] != "none"])
def test_three_times_a_tenth_is_exactly_zero(baseline, scale):
    assert 0.1 + 0.1 + 0.1 != 0.3
    got = group_advantage(np.asarray([0.1, 0.1, 0.1]), np.zeros(3, dtype=int), baseline, scale)
    np.testing.assert_array_equal(got, 0.0)


@pytest.mark.parametrize(
    ("baseline", "scale", "epsilon", "want"),
    [
        # group a: 1 0 0 0 -> mean 1/4, population std sqrt(3)/4; group b: 2 4 -> mean 3, std 1
        ("mean", "std", 0.0, [3 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, -1.0, 1.0]),
        ("mean", "none", 0.0, [0.75, -0.25, -0.25, -0.25, -1.0, 1.0]),
        ("leave_one_out", "none", 0.0, [1.0, -1 / 3, -1 / 3, -1 / 3, -2.0, 2.0]),
        ("none", "none", 0.0, [1.0, 0.0, 0.0, 0.0, 2.0, 4.0]),
        ("mean", "std", 1.0, [0.75 / (3**0.5 / 4 + 1), *[-0.25 / (3**0.5 / 4 + 1)] * 3, -0.5, 0.5]),
    ],
)
def test_by_hand(baseline, scale, epsilon, want):
    rewards, groups = np.asarray([1.0, 0, 0, 0, 2, 4]), np.asarray([0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(group_advantage(rewards, groups, baseline, scale, epsilon), want, rtol=1e-13)


def test_undecided_members_stay_out_of_baseline_and_scale():
    rewards = np.asarray([1.0, np.nan, 0.0, np.nan])
    groups = np.asarray([0, 0, 0, 1])
    np.testing.assert_allclose(group_advantage(rewards, groups, "mean", "std", 0.0), [1, 0, -1, 0])
    np.testing.assert_allclose(group_advantage(rewards, groups, "leave_one_out", "none"), [1, 0, -1, 0])
    np.testing.assert_array_equal(group_advantage(rewards, groups, "none", "none"), [1, 0, 0, 0])
    assert not group_advantage(np.full(3, np.nan), np.zeros(3, dtype=int)).any()
    assert group_advantage(np.zeros(0), np.zeros(0, dtype=int)).shape == (0,)


@pytest.mark.parametrize(("baseline", "scale"), METHODS)
def test_a_group_of_one(baseline, scale):
    got = group_advantage(np.asarray([0.7, 0.2, np.nan]), np.asarray([0, 1, 1]), baseline, scale)
    np.testing.assert_array_equal(got, [0.7, 0.2, 0.0] if baseline == "none" else [0.0, 0.0, 0.0])


@given(case=st.lists(st.tuples(reward.filter(np.isfinite), st.integers(0, 2)), min_size=2, max_size=12))
@settings(max_examples=40, deadline=None)
def test_neutral_settings(case):
    rewards, groups = np.asarray([r for r, _ in case]), numbered([g for _, g in case])
    count = np.bincount(groups)[groups]
    np.testing.assert_array_equal(group_advantage(rewards, groups, "none", "none"), rewards)
    centred = group_advantage(rewards, groups, "mean", "none")
    left_out = group_advantage(rewards, groups, "leave_one_out", "none")
    np.testing.assert_allclose(left_out, centred * count / np.maximum(count - 1, 1), rtol=1e-12, atol=1e-12)
    for group in range(groups.max() + 1):
        assert abs(centred[groups == group].sum()) < 1e-9
    # with an epsilon that swamps every std, GRPO is Dr. GRPO up to that factor
    swamped = group_advantage(rewards, groups, "mean", "std", 1e12) * 1e12
    np.testing.assert_allclose(swamped, centred, rtol=1e-9, atol=1e-9)
    # shifting the rewards changes nothing, scaling them scales (mean, none)
    np.testing.assert_allclose(group_advantage(rewards + 7, groups, "mean", "none"), centred, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(group_advantage(3 * rewards, groups, "mean", "none"), 3 * centred, rtol=1e-9, atol=1e-9)


def test_no_baseline_with_std_does_not_blow_up_equal_rewards():
    got = group_advantage(np.asarray([1.0, 1.0, 1.0, 1.0]), np.zeros(4, dtype=int), "none", "std")
    assert np.abs(got).max() <= 1.0


def test_the_piece_groups_by_draw_wherever_the_rollouts_stand(make_rollout):
    rollouts = [make_rollout([1, 2, 3, 4], group=g) for g in ("b", "a", "b", "a", "c")]
    batch = Batch(rollouts, {"reward": np.asarray([1.0, 5.0, 0.0, 3.0, 9.0])})
    np.testing.assert_allclose(GroupAdvantage(epsilon=0.0)(batch), [1, 1, -1, -1, 0])
    np.testing.assert_allclose(GroupAdvantage("leave_one_out", "none")(batch), [1, 2, -1, -2, 0])
    np.testing.assert_array_equal(batch.column("reward"), [1.0, 5.0, 0.0, 3.0, 9.0])
    assert [GroupAdvantage(b, s).smallest_group for b, s in METHODS] == [2, 2, 2, 2, 2, 1]


def test_selectors(make_rollout):
    groups = ["a", "a", "b", "b", "b", "c", "d", "d"]
    rewards = np.asarray([0.1, 0.1, 1.0, np.nan, 0.0, 1.0, np.nan, np.nan])
    batch = Batch([make_rollout([1, 2, 3, 4], group=g) for g in groups], {"reward": rewards})
    assert mixed_groups(batch).tolist() == [2, 3, 4]
    assert decided(batch).tolist() == [0, 1, 2, 4, 5]
    kept = batch.select(mixed_groups(batch))
    full = GroupAdvantage()(batch)
    np.testing.assert_array_equal(GroupAdvantage()(kept), full[[2, 3, 4]])
