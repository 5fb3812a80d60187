"""Advantages from halves of a group (CANON), common prefixes (TEMPO) and agreement (COPO), against numbers worked by
hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from number_oracles import group_advantages
from rlvr import registry
from rlvr.records import Batch, Verdict, VerdictStatus

NAN = np.nan


@pytest.fixture
def batch_of(make_rollout):
    """`batch_of([(reward, completion ids), ...], ...)`: a batch of groups after a prompt of one token."""

    def make(*groups):
        rollouts, rewards = [], []
        for g, members in enumerate(groups):
            for m, (reward, ids) in enumerate(members):
                rollouts.append(make_rollout([9, *ids], prompt=1, group=f"g{g}", member=m))
                rewards.append(reward)
        batch = Batch(rollouts, {"reward": np.asarray(rewards, dtype=np.float64)})
        batch.token_columns["entropy/current"] = [np.where(r.sampled, r.token_ids / 10, NAN) for r in rollouts]
        return batch

    return make


def advantage(batch, name, **options):
    return registry.build("advantage", {"name": name, **options})(batch)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_halves_by_length(batch_of):
    """Shorter half 1, 0 (mean 0.5), longer half 0, 0 and 1 (mean 1/3)."""
    batch = batch_of([(1.0, [1]), (0.0, [1] * 5), (0.0, [1] * 2), (0.0, [1] * 4), (1.0, [1] * 6), (NAN, [1] * 3)])
    third = 1 / 3
    close(advantage(batch, "conditional", mix=1.0), [1 - third, -0.5, -third, -0.5, 0.5, 0])
    close(advantage(batch, "conditional", mix=0.0), [0.5, -third, -0.5, -third, 1 - third, 0])


def test_equal_halves_and_an_even_mix_are_the_groups_mean(batch_of):
    rng = np.random.default_rng(0)
    groups = [[(float(rng.random()), [1] * int(rng.integers(1, 9))) for _ in range(6)] for _ in range(5)]
    batch = batch_of(*groups)
    expected = group_advantages(
        batch.columns["reward"].tolist(), [r.group for r in batch.rollouts], "mean", "none", 0.0
    )
    for metric in ("length", "entropy"):
        close(advantage(batch, "conditional", metric=metric, mix=0.5), expected)


def test_halves_by_entropy(batch_of):
    batch = batch_of(
        [(1.0, [7, 7]), (0.0, [1, 2]), (0.0, [4])]
    )  # mean entropies 0.7, 0.15, 0.4: low half is the second
    close(advantage(batch, "conditional", metric="entropy", mix=1.0), [1, -0.5, 0])


def test_credit_at_the_branches(batch_of):
    """Prefix 1 has mean 2/3, 1 2 has 1/2, 1 3 has 1; the root has 1/2. Then 1 2 4 against 1 2 5."""
    batch = batch_of([(1.0, [1, 2, 4]), (0.0, [1, 2, 5, 6]), (1.0, [1, 3]), (0.0, [8])])
    steps = [[2 / 3 - 1 / 2, 1 / 2 - 2 / 3, 1 / 2], [1 / 6, -1 / 6, -1 / 2, 0], [1 / 6, 1 / 3], [-1 / 2]]
    rewards = [1, 0, 1, 0]
    for got, r, step in zip(advantage(batch, "prefix_tree", epsilon=0.0), rewards, steps, strict=True):
        close(got, [0, *((r - 0.5 + np.asarray(step)) / 0.5)])
    for got, r, ids in zip(
        advantage(batch, "prefix_tree", branch=0, epsilon=0.0), rewards, batch.rollouts, strict=True
    ):
        close(got, [0, *[(r - 0.5) / 0.5] * (len(ids) - 1)])
    close(sum(advantage(batch, "prefix_tree", epsilon=0.0)[0]), (3 * 0.5 + 0.5) / 0.5)  # the steps sum to r - mean


def test_a_prefix_that_ends_and_undecided_members(batch_of):
    batch = batch_of([(1.0, [1]), (0.0, [1, 2]), (NAN, [1, 2])])
    first, second, third = advantage(batch, "prefix_tree", epsilon=0.0)
    close(first, [0, 1])
    close(second, [0, -1, -2])  # the token that goes on: from 1/2 to 0
    close(third, [0, 0, 0])
    same = batch_of([(1.0, [1]), (1.0, [2])], [(NAN, [1])], [(1.0, [3])], [(1.0, []), (0.0, [])])
    assert all((a == 0).all() for a in advantage(same, "prefix_tree")[:4])


def test_a_wide_group_of_long_responses_is_quick(batch_of):
    ids = [1] * 2000
    got = advantage(batch_of([(float(i % 2), [*ids, i]) for i in range(200)]), "prefix_tree")
    assert got[0][-1] < got[1][-1]


def test_agreement(batch_of):
    """Three prompts with mean rewards 1, 0 and 1/2; the first two agree (H = 0), the third does not (H = 1 bit of at
    most 1, so its mean counts half: 1/4)."""
    batch = batch_of([(1.0, [1])] * 2, [(0.0, [1])] * 2, [(1.0, [1]), (0.0, [2])])
    for rollout, answer in zip(batch.rollouts, ["3", "3 ", "4", "4", "5", "6"], strict=True):
        rollout.verdicts["v"] = Verdict(VerdictStatus.WRONG, 0.0, answer=answer)
    got = advantage(batch, "consistency", sharpness=2.0, level=0.5, epsilon=0.0)
    mean = 1.25 / 3
    spread = math.sqrt(((1 - mean) ** 2 + mean**2 + (0.25 - mean) ** 2) / 2)
    right, wrong, mixed = ((x - mean) / spread for x in (1, 0, 0.25))
    w, z = 1 / (1 + math.exp(-1)), math.sqrt(0.5)  # 0.5 over a deviation of sqrt(1/2)
    close(got, [right, right, wrong, wrong, w * z + (1 - w) * mixed, -w * z + (1 - w) * mixed])
    soft = advantage(batch, "consistency", sharpness=2.0, level=0.5, epsilon=0.0, forced=False, agreement=False)
    close(soft, [w, w, -w, -w, w * z, -w * z])  # 1, 0, -1 over the prompts; sigmoid(1) of it
    local = advantage(batch, "consistency", level=-1e9, epsilon=0.0, forced=False)
    close(local, [0, 0, 0, 0, z, -z])
    batch.columns["reward"][:] = NAN
    assert (advantage(batch, "consistency") == 0).all()


@pytest.mark.parametrize("name", ["conditional", "prefix_tree", "consistency"])
def test_permutation_and_scale_of_the_batch(batch_of, name):
    rng = np.random.default_rng(3)
    groups = [
        [(float(rng.choice([0.0, 1.0, NAN])), rng.integers(1, 3, int(rng.integers(0, 6)))) for _ in range(5)]
        for _ in range(4)
    ]
    batch, order = batch_of(*groups), rng.permutation(20)
    whole, mixed = advantage(batch, name), advantage(batch.select(order), name)
    for i, j in enumerate(order):
        close(mixed[i], whole[j])
    if name != "consistency":  # which compares prompts with each other
        for got, expected in zip(advantage(batch.select(range(10)), name), whole[:10], strict=True):
            close(got, expected)


def steps_by_prefix(members):
    """For each response and token: the mean reward of those that begin with the prefix, minus that before the token."""
    result = []
    for _, ids in members:
        values = []
        for t in range(len(ids)):
            before, after = ([r for r, other in members if list(other[:n]) == list(ids[:n])] for n in (t, t + 1))
            values.append(math.fsum(after) / len(after) - math.fsum(before) / len(before))
        result.append(values)
    return result


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_equals_a_loop_over_prefixes(batch_of, seed):
    """Ragged groups, empty responses among them, whose tokens and rewards repeat."""
    rng = np.random.default_rng(seed)
    groups = [
        [
            (float(rng.integers(0, 3)) / 2, rng.integers(1, 3, rng.integers(0, 6)).tolist())
            for _ in range(rng.integers(2, 9))
        ]
        for _ in range(5)
    ]
    got = iter(advantage(batch_of(*groups), "prefix_tree", epsilon=0.0))
    for members in groups:
        rewards = np.asarray([r for r, _ in members])
        for (r, ids), steps in zip(members, steps_by_prefix(members), strict=True):
            own = next(got)
            if rewards.min() == rewards.max():
                assert not own.any()
            else:
                close(
                    own[-len(ids) :] if ids else [],
                    (r - rewards.mean() + np.asarray(steps)) / rewards.std() if ids else [],
                )
