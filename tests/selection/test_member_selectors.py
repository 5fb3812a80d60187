"""Which rollouts train: every selector against choices worked by hand, and what holds for all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.config import Config
from rlvr.errors import ConfigError
from rlvr.records import Batch, Origin, Rollout, StopReason, Task
from rlvr.stages.grpo.scoring import Scoring

NAN = np.nan


def batch_of(*groups, lengths=None, sources=None):
    """A batch of groups, each a list of rewards."""
    rollouts, rewards = [], [r for group in groups for r in group]
    for g, group in enumerate(groups):
        task = Task(id=f"t{g}", prompt="?", source=None if sources is None else sources[g])
        for m in range(len(group)):
            size = 1 + (2 if lengths is None else lengths[len(rollouts)])
            origin = np.full(size, Origin.POLICY, dtype=np.int8)
            origin[0] = Origin.PROMPT
            rollouts.append(
                Rollout(
                    id=f"{g}/{m}",
                    task=task,
                    group=f"g{g}",
                    member=m,
                    token_ids=np.arange(size),
                    origin=origin,
                    behaviour_logprobs=np.full(size, np.nan, dtype=np.float32),
                    policy_version=np.zeros(size, dtype=np.int32),
                    stop=StopReason.END,
                )
            )
    return Batch(rollouts, {"reward": np.asarray(rewards, dtype=np.float64), "advantage": -np.asarray(rewards)})


def kept(name, batch, **options):
    positions = np.asarray(registry.build("selector", {"name": name, **options})(batch))
    return (np.flatnonzero(positions) if positions.dtype == bool else positions).tolist()


def test_mixed_and_decided():
    batch = batch_of([1, 0, NAN], [1, 1], [NAN], [0.5, NAN])
    assert kept("mixed_groups", batch) == [0, 1, 2]
    assert kept("decided", batch) == [0, 1, 3, 4, 6]


def test_a_band_of_pass_rates():
    batch = batch_of([1, 1], [1, 0, NAN], [0, 0, 0, 1], [0, 0], [NAN])
    assert kept("pass_rate_band", batch) == list(range(11))
    assert kept("pass_rate_band", batch, low=0.25, high=0.5) == [2, 3, 4, 5, 6, 7, 8]
    assert kept("pass_rate_band", batch, low=0.3, high=0.9) == [2, 3, 4]
    batch.columns["reward/x"] = 1 - batch.columns["reward"]
    assert kept("pass_rate_band", batch, low=1, column="reward/x") == [9, 10]
    with pytest.raises(KeyError, match="reward/y"):
        kept("pass_rate_band", batch, column="reward/y")


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


def test_a_moving_bound_on_the_spread():
    selector = registry.build("selector", {"name": "spread", "share": 0.5, "decay": 0.5})
    wide, narrow = [1, 0], [0.5, 0.4]
    assert selector(batch_of(wide, narrow, [1, 1])).tolist() == [0, 1, 2, 3]
    assert selector.state_dict() == {"average": None}
    selector.observe({})  # mean spread (0.5 + 0.05 + 0) / 3
    assert selector.state_dict()["average"] == pytest.approx(0.55 / 3)
    assert selector(batch_of(wide, narrow)).tolist() == [0, 1]  # half of 0.183 is more than 0.05
    selector.observe({})
    again = registry.build("selector", {"name": "spread", "share": 0.5, "decay": 0.5})
    again.load_state_dict(selector.state_dict())
    assert again.state_dict()["average"] == pytest.approx(0.5 * 0.55 / 3 + 0.5 * 0.275)
    assert registry.build("selector", {"name": "spread", "share": 0})(batch_of([1, 1], [NAN])).tolist() == [0, 1]


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


def scoring(*selectors, **algorithm):
    return Scoring(Config.model_validate({"algorithm": {"select": list(selectors), **algorithm}}))


def test_selectors_in_order_with_scheduled_options():
    moving = {"name": "pass_rate_band", "low": {"schedule": "linear", "start": 0.0, "end": 1.0}}
    both = scoring(moving, {"name": "best_worst", "best": 1, "worst": 1})
    batch = batch_of([1, 0, 1, 1], [1, 1, 1])
    assert [r.id for r in both.select(batch, 0, 10).rollouts] == ["0/1", "0/3", "1/0", "1/2"]
    assert [r.id for r in both.select(batch, 9, 10).rollouts] == ["1/0", "1/2"]
    assert both.components.scheduled(5, 10) == {"schedule/pass_rate_band.low": 0.5}


def test_what_reads_advantages_comes_after_them():
    with pytest.raises(ConfigError, match=r"'best_worst' reads advantages.*select_after=true"):
        scoring({"name": "best_worst", "column": "advantage"})
    scoring({"name": "best_worst", "column": "advantage"}, select_after=True)


def test_a_selector_that_compares_members_of_groups_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"group_size is 1, and the selector 'shortest'"):
        Scoring(Config.model_validate({"rollout": {"group_size": 1}, "algorithm": {"select": ["shortest"]}}))


@pytest.mark.parametrize("give", [[7], [-1], [0, 0], [True]])
def test_positions_that_are_not_there_are_refused_by_name(tmp_path, give):
    (tmp_path / "mine.py").write_text(f"import numpy as np\ndef odd(batch): return np.asarray({give})\n")
    with pytest.raises(ConfigError, match="odd"):
        scoring(f"{tmp_path}/mine.py:odd").select(batch_of([1, 0]), 0, 1)


def test_a_limit_that_float64_writes_just_below_a_whole_number():
    groups = [[1.0, 0.0]] * 215
    sources = ["a"] * 115 + ["b"] * 100
    batch = batch_of(*groups, sources=sources)
    assert len(kept("balance_sources", batch, most=1.15)) == 2 * 215
