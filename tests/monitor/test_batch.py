"""Metrics of a batch that the monitors read: repetition, duplicates, and what a term explains."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.monitor.batch import batch_metrics
from rlvr.records import Batch, Origin, StopReason


def test_repetition_counts_runs_of_four_tokens_that_come_again(rollout):
    one, two = rollout(tokens=8), rollout(member=1, tokens=8)
    one.token_ids[3:] = [1, 2, 3, 4, 1, 2, 3, 4]  # 5 runs: 1234 2341 3412 4123 1234, of which one comes again
    two.token_ids[3:] = [5] * 8  # 5 runs, all the same: 4 come again
    assert batch_metrics(Batch([one, two]))["completion/repetition"] == 0.5
    assert batch_metrics(Batch([rollout(tokens=3)]))["completion/repetition"] is None


def test_repetition_is_that_of_sets_of_runs(rollout):
    """Rollouts of several lengths and turns, ids of a vocabulary whose fourth power no integer holds."""
    random = np.random.default_rng(0)
    rollouts = []
    for member in range(40):
        one = rollout(member=member, tokens=int(random.integers(0, 30)))
        one.token_ids = random.choice([3, 150_000, 2**31 - 2], len(one.token_ids))
        one.origin[3:][random.random(len(one.origin) - 3) < 0.1] = Origin.TOOL
        rollouts.append(one)
    runs = repeats = 0
    for one in rollouts:
        ids = one.token_ids[one.origin == Origin.POLICY].tolist()
        grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        runs, repeats = runs + len(grams), repeats + len(grams) - len(set(grams))
    got = batch_metrics(Batch(rollouts))
    assert got["completion/repetition"] == repeats / runs
    lengths = [int((one.origin != Origin.PROMPT).sum()) for one in rollouts]
    result = [got[f"completion/length_{name}"] for name in ("mean", "max", "min")]
    assert result == [np.mean(lengths), max(lengths), min(lengths)]
    assert got["tokens/sampled"] == sum(int((one.origin == Origin.POLICY).sum()) for one in rollouts)
    assert batch_metrics(Batch([]))["completion/length_mean"] is None


def test_duplicates_are_counted_within_groups_and_not_among_demonstrations(rollout):
    rollouts = [rollout("a", k, text=text) for k, text in enumerate("xxxy")] + [rollout("b", 0, text="x")]
    assert batch_metrics(Batch(rollouts))["completion/duplicates"] == pytest.approx(2 / 5)
    given = [rollout("a", k, stop=StopReason.GIVEN) for k in range(2)]
    assert batch_metrics(Batch(given))["completion/duplicates"] is None


def test_what_a_term_explains_is_the_squared_correlation_within_groups(rollout):
    random = np.random.default_rng(1)
    batch = Batch([rollout(f"g{k // 4}", k % 4) for k in range(12)])
    a, b = random.normal(size=12) + np.repeat([0, 50, -9], 4), random.normal(size=12)
    batch.columns |= {"reward/a": a, "reward/b": b, "reward/c": np.ones(12), "reward": 2 * a - b}
    batch.columns["reward/a"][5] = np.nan
    got = batch_metrics(batch)
    for name, column in (("a", a), ("b", b)):
        pairs = [
            (column[i] - np.nanmean(column[g]), batch.columns["reward"][i] - batch.columns["reward"][g].mean())
            for g in (slice(0, 4), slice(4, 8), slice(8, 12))
            for i in range(g.start, g.stop)
        ]
        if name == "b":
            expected = np.corrcoef([p[0] for p in pairs], [p[1] for p in pairs])[0, 1] ** 2
            assert got["explained/b"] == pytest.approx(expected)
    assert 0.0 <= (got["explained/a"] or 0.0) <= 1.0
    assert got["explained/c"] == 0.0
    batch.columns["reward"] = np.ones(12)
    assert batch_metrics(batch)["explained/a"] is None
    assert "explained/a" not in batch_metrics(Batch([rollout()], {"reward/a": np.ones(1), "reward": np.ones(1)}))
