"""Batches of made-up rollouts for the tests of advantages, and the checks that every estimator and modifier passes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from rlvr.records import Batch, Origin, Rollout, StopReason, Task

PROMPT = 2
"""Tokens before the sampled ones."""

reward = st.sampled_from([0.0, 1.0, 1.0, 0.0, 0.1, 0.5, -1.0, 3.25, math.nan])
cases = st.lists(st.tuples(reward, st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=12)
"""(reward, group, sampled tokens) of each rollout."""


def batch_of(rewards, groups=None, lengths=None, **columns):
    """A batch of rollouts with these rewards; log-probs and statistics are noise that depends on the rollout only."""
    groups = [0] * len(rewards) if groups is None else groups
    lengths = [3] * len(rewards) if lengths is None else lengths
    rollouts, statistics = (
        [],
        {"logprobs": [], "entropy": [], "sum_squared_probs": [], "logsumexp": [], "mean_logit": []},
    )
    for i, (group, length) in enumerate(zip(groups, lengths, strict=True)):
        rng = np.random.default_rng([i, length])
        origin = np.full(PROMPT + length, Origin.POLICY, dtype=np.int8)
        origin[:PROMPT] = Origin.PROMPT
        sampled = np.where(origin == Origin.POLICY, 1.0, np.nan)
        for values in statistics.values():
            values.append(rng.uniform(0.1, 2.0, PROMPT + length) * sampled)
        statistics["logprobs"][-1] *= -1
        statistics["sum_squared_probs"][-1] /= 2
        rollouts.append(
            Rollout(
                id=f"{group}/{i}",
                task=Task(id=f"task-{group}", prompt="?"),
                group=str(group),
                member=i,
                token_ids=np.arange(PROMPT + length),
                origin=origin,
                behaviour_logprobs=(statistics["logprobs"][-1]).astype(np.float32),
                policy_version=np.where(origin == Origin.POLICY, 0, -1).astype(np.int32),
                stop=StopReason.END,
            )
        )
    return Batch(
        rollouts,
        {
            "reward": np.asarray(rewards, dtype=np.float64),
            **{k: np.asarray(v, dtype=np.float64) for k, v in columns.items()},
        },
        {f"{name}/current": values for name, values in statistics.items()},
    )


def of_case(case):
    """The batch of a drawn case."""
    return batch_of(*(list(part) for part in zip(*case, strict=True)))


def spread(batch, advantage):
    """An advantage of either form as a list of lists of the sampled tokens' numbers."""
    columns = (
        advantage
        if isinstance(advantage, list)
        else [np.full(len(r), a) for r, a in zip(batch.rollouts, advantage, strict=True)]
    )
    return [c[r.sampled].tolist() for c, r in zip(columns, batch.rollouts, strict=True)]


def members(rewards, groups, i):
    """Positions of the decided members of the group of rollout i."""
    return [j for j, r in enumerate(rewards) if groups[j] == groups[i] and math.isfinite(r)]


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values, unbiased=False):
    values = list(values)
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / max(1, len(values) - int(unbiased)))


def assert_sound(batch, advantage):
    """Finite, 0 where undecided, 0 on tokens that the policy did not write, float64."""
    undecided = ~np.isfinite(batch.columns["reward"])
    if isinstance(advantage, list):
        assert [len(a) for a in advantage] == [len(r) for r in batch.rollouts]
        for values, rollout, out in zip(advantage, batch.rollouts, undecided, strict=True):
            assert np.isfinite(values).all()
            assert not values[~rollout.sampled].any()
            assert not (out and values.any())
    else:
        assert advantage.dtype == np.float64
        assert advantage.shape == (len(batch),)
        assert np.isfinite(advantage).all()
        assert not advantage[undecided].any()


def assert_ordered(estimate, batch, order, tolerance=1e-9):
    """Permuting the rollouts permutes the advantages (N4)."""
    got, shuffled = spread(batch, estimate(batch)), spread(batch.select(order), estimate(batch.select(order)))
    for place, i in enumerate(order):
        np.testing.assert_allclose(shuffled[place], got[i], rtol=tolerance, atol=tolerance)


def assert_alone(estimate, batch, more):
    """Rollouts of other groups change nothing (N4)."""
    both = Batch(
        [*more.rollouts, *batch.rollouts],
        {name: np.concatenate([more.columns[name], values]) for name, values in batch.columns.items()},
        {name: [*more.token_columns[name], *values] for name, values in batch.token_columns.items()},
    )
    alone, among = spread(batch, estimate(batch)), spread(both, estimate(both))[len(more) :]
    for a, b in zip(alone, among, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-9)
