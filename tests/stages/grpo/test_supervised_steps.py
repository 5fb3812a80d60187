"""`algorithm.supervised_steps`: steps that learn demonstrations alone, drawn by chance, through the real trainer."""

from __future__ import annotations

import pytest

from rlvr.errors import ConfigError, DataError
from rlvr.records import StopReason
from small_run import overlaid, task_rows, timeless

LEARNED = {"auxiliary": [{"name": "likelihood", "on": "demonstrations"}]}


def drawn(over=None, **options):
    algorithm = {"algorithm": {**LEARNED, "supervised_steps": {"warmup": 2, **options}}}
    return overlaid(overlaid({"run": {"steps": 12}}, algorithm), over or {})


def kinds(rows):
    """True for each step that learned demonstrations alone: nothing was verified in it."""
    return [row["reward/mean"] is None for row in rows]


def test_a_run_has_steps_of_both_kinds_and_no_step_has_both(make_trainer):
    trainer = make_trainer(drawn())
    rows = trainer.train()
    supervised = kinds(rows)
    assert supervised[:2] == [True, True]
    assert {True, False} == set(supervised[2:])
    for row, alone in zip(rows, supervised, strict=True):
        assert (row["tokens/sampled"] == 0) == alone
        # The likelihood of a step without demonstrations, and the policy loss of one without rollouts, have no token.
        assert (row["loss/likelihood"] != 0) == alone
        assert row["grad_norm"] is not None


@pytest.mark.parametrize(("gamma", "alone"), [(0.0, True), (1e9, False)])
def test_gamma_says_how_many_are_supervised(make_trainer, gamma, alone):
    rows = make_trainer(drawn(gamma=gamma)).train()
    assert kinds(rows) == [True, True, *[alone] * 10]


def test_the_probability_is_that_of_the_logged_norms(make_trainer):
    trainer = make_trainer(drawn(gamma=2.0))
    rows = trainer.train()
    norms = [row["grad_norm"] for row, alone in zip(rows, kinds(rows), strict=True) if alone]
    expected = norms[-1] / (norms[-1] + 2 * norms[1])
    assert trainer.stages[0]._supervision.probability(12) == pytest.approx(expected)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(make_trainer):
    whole = timeless(make_trainer(drawn(), name="whole").train(), "run/", "memory/")
    first = make_trainer(drawn(), name="parts")
    first.train(5)
    first.close()
    rest = timeless(make_trainer(drawn(), name="parts", resume="auto").train(), "run/", "memory/")
    names = ("grad_norm", "loss/total", "reward/mean", "tokens/trained")
    assert [[row[name] for name in names] for row in rest] == [[row[name] for name in names] for row in whole]


def test_a_step_that_failed_is_drawn_again(make_trainer):
    stage = make_trainer(drawn()).stages[0]
    before = stage.collect(0)
    assert all(rollout.stop is StopReason.GIVEN for rollout in before.rollouts)
    stage.roll_back()
    again = stage.collect(0)
    assert [r.task.id for r in again.rollouts] == [r.task.id for r in before.rollouts]


def test_a_supervised_step_that_failed_draws_no_trained_task_again(make_trainer, monkeypatch):
    """Reinforcement, a supervised step that is collected twice, reinforcement: each has draws of its own."""
    stage = make_trainer(drawn()).stages[0]
    monkeypatch.setattr(stage._supervision, "drawn", {0: False, 1: True, 2: False}.__getitem__)

    def draws(step):
        return {int(rollout.group.split("/")[0]) for rollout in stage.collect(step).rollouts}

    first = draws(0)
    failed = draws(1)
    stage.roll_back()
    assert draws(1) == failed
    third = draws(2)
    assert sorted([*first, *failed, *third]) == list(range(len(first) + len(failed) + len(third)))


def test_without_the_option_demonstrations_stand_beside_the_groups(make_trainer):
    rows = make_trainer({"run": {"steps": 2}, "algorithm": LEARNED}).train()
    assert kinds(rows) == [False, False]
    assert all(row["loss/likelihood"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"algorithm": {"auxiliary": []}}, "no term learns them"),
        ({"rollout": {"staleness": 1}}, "set rollout.staleness to 0"),
        ({"algorithm": {"supervised_steps": {"warmup": 0}}}, "greater than or equal to 1"),
        ({"algorithm": {"supervised_steps": {"gamma": -1}}}, "greater than or equal to 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(make_trainer, over, problem):
    with pytest.raises(ConfigError, match=problem):
        make_trainer(drawn(over))


def test_every_task_needs_a_demonstration(make_trainer):
    rows = task_rows()
    del rows[2]["demonstration"]
    with pytest.raises(DataError, match=r"1 of 6 tasks have none, the first is tasks\[2\]"):
        make_trainer(drawn(), tasks=rows)


def test_ranks_that_did_not_collect_score_with_the_schedule_of_the_step(make_trainer):
    """The weight of a reward that is scheduled is that of the step, wherever the rollouts were collected."""
    rewards = ["verdict", {"name": "constant", "value": 1.0, "weight": {"at": {0: 0.0, 2: 5.0}}}]
    one, other = (make_trainer({"rewards": rewards}, name=name) for name in ("one", "other"))
    collected = one.stages[0].collect(0)
    one.stages[0].roll_back()
    collected.step = 2
    batch, _ = other.stages[0].score(collected)
    assert batch.column("reward").min() >= 5
