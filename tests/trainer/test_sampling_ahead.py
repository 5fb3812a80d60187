"""Whole runs that sample ahead of training, sample dynamically, and correct what other weights sampled."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest

from rlvr import register_reward
from rlvr.errors import ConfigError
from rlvr.trainer import GRPOTrainer
from small_run import changed, timeless, weights


def groups_trained(trainer):
    """Draw numbers, as `batch` is seen after every step."""
    seen = []
    record = trainer._record

    def spy(stage, collected, batch, metrics):
        seen.append(sorted({int(r.group) for r in collected.rollouts}))
        record(stage, collected, batch, metrics)

    trainer._record = spy
    return seen


def batches_trained(trainer):
    """The batches of the steps, as they are trained."""
    batches = []
    record = trainer._record

    def spy(stage, collected, batch, metrics):
        batches.append(batch)
        record(stage, collected, batch, metrics)

    trainer._record = spy
    return batches


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_a_run_that_samples_ahead_trains_every_draw_once(make_trainer, staleness, in_flight):
    trainer = make_trainer({"run": {"steps": 6}, "rollout": {"staleness": staleness, "in_flight": in_flight}})
    seen, before = groups_trained(trainer), weights(trainer)
    rows = trainer.train()
    assert seen == [[2 * step, 2 * step + 1] for step in range(6)]
    assert changed(before, weights(trainer))
    assert all(row["policy/staleness_max"] <= min(staleness, step) for step, row in enumerate(rows))
    assert rows[-1]["policy/staleness_mean"] > 0
    assert all(row["correction/weight"] is not None for row in rows)  # auto: the engine has weights of its own
    assert all(row["mismatch/max"] < (1e-4 if step == 0 else 10) for step, row in enumerate(rows))
    assert not trainer.rollouts.engine.shares_weights


def test_staleness_0_is_the_synchronous_run(make_trainer):
    """Bit for bit where the engine has a copy of the weights too."""
    shared = make_trainer({"algorithm": {"correction": None}}, "shared")
    engine = {"name": "hf", "copy_weights": True}
    copied = make_trainer({"rollout": {"engine": engine, "staleness": 0}, "algorithm": {"correction": None}}, "copied")
    shared.train()
    copied.train()
    assert changed(weights(shared), weights(copied)) == []
    skip = {"time/", "publish/"}
    for one, other in zip(timeless(shared.metrics), timeless(copied.metrics), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(tuple(skip))} == {
            k: v for k, v in other.items() if not k.startswith(tuple(skip))
        }


def test_without_staleness_no_correction_touches_the_run(make_trainer):
    row = make_trainer().train()[-1]
    assert row["correction/weight"] is None
    assert row["mismatch/effective"] == pytest.approx(1.0, abs=1e-6)
    assert row["policy/staleness_mean"] == 0


@pytest.mark.parametrize("correction", ["truncate", "mask", "reject", {"name": "truncate", "level": "sequence"}])
def test_every_correction_in_a_run(make_trainer, correction):
    over = {"rollout": {"staleness": 1}, "algorithm": {"correction": correction}, "run": {"steps": 3}}
    rows = make_trainer(over).train()
    assert all(0 <= row["correction/touched"] <= 1 for row in rows)


def test_the_decoupled_objective_in_a_run(make_trainer):
    over = {"rollout": {"staleness": 1}, "algorithm": {"decoupled": True}, "optim": {"updates_per_batch": 2}}
    trainer = make_trainer(over)
    trainer.train()
    assert "logprobs/proximal" in trainer.batch.token_columns


def test_a_stopped_run_that_samples_ahead_goes_on(make_trainer, make_tree):
    """In the same trainer and in another: no draw is lost, none is trained twice."""
    over = {"run": {"steps": 6}, "rollout": {"staleness": 2}}
    first = make_trainer(over)
    seen = groups_trained(first)
    first.train(2)
    assert first.step == 2
    first.close()
    with GRPOTrainer(config=make_tree(over)) as second:
        more = groups_trained(second)
        second.train(resume="auto")
    assert [*seen, *more] == [[2 * step, 2 * step + 1] for step in range(6)]


def test_dynamic_sampling_in_a_run(make_trainer):
    """Groups of equal rewards are replaced, and are still in the metrics and the history."""
    over = {"run": {"steps": 4}, "rollout": {"dynamic_sampling": {"attempts": 4}, "max_new_tokens": 1, "group_size": 2}}
    trainer = make_trainer(over)
    batches = batches_trained(trainer)
    rows = trainer.train()
    assert any(row["rollout/dropped"] for row in rows)
    for batch, row in zip(batches, rows, strict=True):
        assert len(batch) == 4
        assert row["group/count"] == 2 + row["rollout/dropped"] / 2
    mixed = [len(set(batch.column("reward")[g.index])) > 1 for batch in batches for g in batch.groups()]
    assert sum(mixed) > len(mixed) / 2
    sampled = sum(4 + row["rollout/dropped"] for row in rows)
    assert sum(trainer.rollouts.history[task].attempts for task in trainer.rollouts.history) == sampled


def test_a_correction_that_does_not_exist_is_named(make_trainer):
    with pytest.raises(ConfigError, match="truncate"):
        make_trainer({"algorithm": {"correction": "trunkate"}})


def test_every_reward_function_is_called_once_per_rollout_under_dynamic_sampling(make_trainer):
    """Also for groups that were dropped or kept for a later step, and not on the thread that samples."""
    calls, shapes, threads = Counter(), [], set()

    def coin(completion, token_ids):
        """1 for about half of the rollouts, at random: a second call would contradict the first."""
        calls["coin"] += 1
        threads.add(threading.current_thread().name)
        return float(random.random() < 0.5)

    def of_group(completions, completion_ids, **columns):
        assert len(columns["answer"]) == len(completions) == len(completion_ids)
        calls["of_group"] += len(completions)
        return [0.25 + n for n in range(len(completions))]

    def of_batch(batch):
        shapes.append(len(batch))
        return np.zeros(len(batch))

    for function in (coin, of_group, of_batch):
        register_reward(f"once_{function.__name__}")(function)
    random = np.random.default_rng(0)
    over = {
        "rewards": ["once_coin", {"name": "once_of_group", "weight": 0.0}, "once_of_batch"],
        "rollout": {"dynamic_sampling": {"attempts": 4, "oversample": 2}, "group_size": 2, "staleness": 1},
        "run": {"steps": 4},
        "algorithm": {"select": ["mixed_groups"]},
    }
    trainer = make_trainer(over)
    batches = batches_trained(trainer)
    rows = trainer.train()
    trainer.close()  # what was sampled ahead was scored too, and is not asked about here
    assert any(row["rollout/dropped"] for row in rows)
    scored = sum(4 + row["rollout/dropped"] for row in rows)
    assert scored <= calls["coin"] == calls["of_group"] == sum(size for size in shapes if size == 2)  # by draw
    assert sum(size for size in shapes if size > 2) == scored  # of the batch: again with the whole step
    assert threads == {"rlvr-rewards"}
    kept = [rollout.term_values for batch in batches for rollout in batch.rollouts]
    assert {values["once_coin"] for values in kept} == {0.0, 1.0}
    columns = np.concatenate([batch.column("reward/once_coin") for batch in batches])
    assert columns.tolist() == [values["once_coin"] for values in kept]
    half = np.concatenate([batch.column("reward/once_of_group") for batch in batches])
    assert half.tolist() == [0.25, 1.25] * (len(half) // 2)


def test_plain_functions_are_called_before_the_other_ranks_get_the_rollouts(make_trainer):
    """Scoring, which every rank does, finds the values of all rollouts, of the baselines too."""
    calls = []
    register_reward("early_coin")(lambda completion: calls.append(completion) or float(len(calls)))
    trainer = make_trainer(
        {
            "rewards": ["early_coin"],
            "rollout": {"plan": {"name": "single_turn", "baseline": "greedy"}},
            "algorithm": {"advantage": {"name": "group", "baseline": "greedy", "scale": "none"}},
            "run": {"steps": 1},
        }
    )
    stage = trainer.stages[0]
    score, asked = stage.score, []

    def spy(collected):
        asked.append(len(calls))
        assert all("early_coin" in rollout.term_values for rollout in collected.rollouts)
        return score(collected)

    stage.score = spy
    trainer.train()
    assert asked == [2 * (4 + 1)] and len(calls) == 10


def test_no_two_threads_are_inside_of_reward_functions(make_trainer):
    """While a step is scored on the trainer's thread, draws of later steps are looked at on another."""
    inside, most, threads = [], [], set()

    def of_batch(batch):
        inside.append(1)
        threads.add(threading.current_thread().name)
        most.append(len(inside))
        time.sleep(0.03)
        inside.pop()
        return np.asarray([float(len(rollout.text) % 3) for rollout in batch.rollouts])

    register_reward("slow_of_batch")(of_batch)
    rollout = {"dynamic_sampling": {"attempts": 4}, "staleness": 2, "prompts_per_step": 4}
    make_trainer({"run": {"steps": 4}, "rewards": ["slow_of_batch"], "rollout": rollout}).train()
    assert len(threads) == 2 and max(most) == 1
