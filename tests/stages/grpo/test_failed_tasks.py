"""`algorithm.supervised_steps.gather`: demonstrations of tasks at which whole groups failed, in steps of their own."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.config import SupervisedStepsConfig
from rlvr.errors import ConfigError
from rlvr.records import Batch, StopReason, Task, Verdict
from rlvr.stages.grpo.failed_tasks import FailedTasks
from small_run import overlaid, task_rows, timeless

LEARNED = {"auxiliary": [{"name": "likelihood", "on": "demonstrations"}]}
TASKS = [Task(id=f"t{n}", prompt="?", demonstration="a" if n < 8 else None) for n in range(10)]


def gathered(over=None, gather=3):
    algorithm = {"algorithm": {**LEARNED, "supervised_steps": {"gather": gather}}}
    return overlaid(overlaid({"run": {"steps": 10}, "verifier": "exact"}, algorithm), over or {})


def gathering(gather, **options):
    return FailedTasks(SupervisedStepsConfig(gather=gather, **options), TASKS)


@pytest.fixture
def scored(make_rollout):
    """`scored({task: rewards}, verdicts=None)`: a step with a group of these rewards, and of these scores of verdicts,
    for each task."""

    def make(groups, verdicts=None):
        rollouts, rewards = [], []
        for number, values in groups.items():
            for member, value in enumerate(values):
                rollout = make_rollout([9, 1], prompt=1, group=f"g{number}", member=member)
                rollout.task = TASKS[number]
                if verdicts is not None:
                    rollout.verdicts["v"] = Verdict.from_score(verdicts[number][member])
                rollouts.append(rollout)
                rewards.append(value)
        return Batch(rollouts, {"reward": np.asarray(rewards, dtype=np.float64)})

    return make


def ids(taken):
    return [task.id for _, task in taken]


def test_one_row_of_each_failed_group_and_the_newest_first(scored):
    """trainer.py of TheRoadQaQ/ReLIFT@eb95454: rows of groups whose rewards are all 0 go before those that wait, and a
    slice from the front is learned when enough are there."""
    failed = gathering(3)
    failed.look(scored({0: [0, 0], 1: [0, 1], 2: [0, 0], 3: [1, 1], 4: [0.1, 0]}))
    assert not failed.drawn(1)
    # Neither a group with an undecided response nor a task without a demonstration.
    failed.look(scored({5: [0, 0], 6: [np.nan, 0], 8: [0, 0], 7: [0, 0]}))
    assert failed.drawn(2)
    assert ids(failed.take(None, 2)) == ["t5", "t7", "t0"]
    assert not failed.drawn(3)
    # A task that failed in two epochs is learned twice, under two names.
    failed.look(scored({2: [0, 0], 5: [0, 0]}))
    taken = failed.take(None, 2)
    assert ids(taken) == ["t2", "t5", "t2"]
    assert len({key for key, _ in taken}) == 3


@pytest.mark.parametrize(("failed", "gathered"), [(0.0, ["t0", "t1"]), (-1.0, ["t1"]), (0.5, ["t0", "t1", "t2"])])
def test_a_group_has_failed_where_no_reward_is_above_that_of_failed_responses(scored, failed, gathered):
    """Wrong responses may cost (-1), or earn something for their form (0.5)."""
    tasks = gathering(9, failed=failed)
    tasks.look(scored({0: [-1, 0], 1: [-1, -1], 2: [0.5, 0], 3: [1, -1], 5: [np.nan, -1]}))
    assert tasks.state_dict()["waiting"] == gathered


@pytest.mark.parametrize(
    ("rewards", "verdicts", "said"),
    [
        ({0: [0.1, 0.1]}, {0: [0, 0]}, "every verdict is 0 and the largest reward is 0.1, so that it is not gathered"),
        ({0: [0, -1]}, {0: [1, 0]}, "a verdict is 1 and no reward is above 0, so that it is gathered as failed"),
        ({0: [0, 0], 1: [1, 0]}, {0: [0, 0], 1: [1, 0]}, None),
        ({0: [-1, -1]}, {0: [0, 0]}, None),
    ],
)
def test_rewards_that_disagree_with_the_verdicts_are_said_once(scored, caplog, rewards, verdicts, said):
    tasks = gathering(9)
    for _ in range(2):
        tasks.look(scored(rewards, verdicts))
    messages = [record.getMessage() for record in caplog.records]
    if said is None:
        assert not messages
        return
    (message,) = messages
    assert said in message
    assert "algorithm.supervised_steps.failed is 0: of the group of " in message
    assert TASKS[0].named in message


def test_a_step_that_is_rolled_back_leaves_no_trace(scored):
    failed = gathering(2)
    failed.look(scored({0: [0, 0]}))
    before = failed.state_dict()
    failed.drawn(1)
    failed.look(scored({1: [0, 0]}))
    failed.roll_back()
    assert failed.state_dict() == before
    failed.look(scored({1: [0, 0]}))
    assert failed.drawn(2)
    assert ids(failed.take(None, 2)) == ["t1", "t0"]
    failed.roll_back()
    assert failed.state_dict()["waiting"] == ["t1", "t0"]


def test_a_run_learns_what_it_failed_at(make_trainer):
    """A random policy fails at nearly all groups of a small run: two of a step, so that every second or third step
    learns three demonstrations, all of tasks that failed before."""
    trainer = make_trainer(gathered())
    supervised, failed, learned = [], [], []
    for _ in range(10):
        trainer.train(1)
        rollouts = trainer.batch.rollouts
        supervised.append(all(r.stop is StopReason.GIVEN for r in rollouts))
        if supervised[-1]:
            learned += [r.task.id for r in rollouts]
        else:
            reward = trainer.batch.column("reward")
            failed += [
                g.rollouts[0].task.id for g in trainer.batch.groups() if not np.nan_to_num(reward[g.index]).any()
            ]
    assert {True, False} == set(supervised) and not supervised[0]
    assert len(learned) == 3 * sum(supervised)
    assert len(failed) - len(learned) in range(4)
    assert not set(learned) - set(failed)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(make_trainer):
    whole = timeless(make_trainer(gathered(), name="whole").train(), "run/", "memory/")
    first = make_trainer(gathered(), name="parts")
    first.train(5)
    first.close()
    rest = timeless(make_trainer(gathered(), name="parts", resume="auto").train(), "run/", "memory/")
    names = ("grad_norm", "loss/total", "reward/mean", "tokens/trained")
    assert [[row[name] for name in names] for row in rest] == [[row[name] for name in names] for row in whole]


def test_a_run_with_a_price_on_wrong_responses_learns_what_it_failed_at(make_trainer):
    """Right is 1 and wrong is -1."""
    trainer = make_trainer(
        gathered({"rewards": [{"name": "verdict", "weight": 2.0}, {"name": "constant", "value": -1}]})
    )
    trainer.train(6)
    assert trainer.stages[0]._supervision.state_dict()["learned"] >= 3


@pytest.mark.parametrize("options", [{}, {"warmup": 2, "gather": 3}, {"warmup": 2, "failed": -1.0}], ids=str)
def test_one_of_the_two_rules_is_chosen(make_trainer, options):
    with pytest.raises(ConfigError, match=r"set warmup, .* or gather|leave it out, or set gather"):
        make_trainer({"algorithm": {**LEARNED, "supervised_steps": options}}, tasks=task_rows())
