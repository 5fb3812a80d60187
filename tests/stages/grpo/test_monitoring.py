"""Responses that a reward measures the policy by and that are not trained, through the real trainer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlvr.components import Monitoring
from rlvr.errors import ConfigError
from small_run import overlaid, timeless

PIECE = '''
from dataclasses import dataclass, field
from typing import Any, ClassVar
import numpy as np
from rlvr.components import Monitoring, RewardTerm

@dataclass
class Measured(RewardTerm):
    """A reward of 0 that keeps what it is shown."""
    every: int = 2
    tasks: int = 3
    of: Any = "verdict"
    inner: ClassVar = ("of",)
    shown: list = field(default_factory=list, init=False)
    values: list = field(default_factory=list, init=False)
    rewarded: list = field(default_factory=list, init=False)   # measurements made before each call

    @property
    def monitoring(self):
        return Monitoring(self.every, self.tasks, 5)

    def monitored(self, batch, **given):
        self.shown.append(batch.rollouts)
        self.values.append(given["of"])

    def __call__(self, batch, of):
        self.rewarded.append(len(self.shown))
        return np.zeros(len(batch))
'''


@pytest.fixture
def with_measured(make_trainer, tmp_path):
    """`with_measured({section: {...}}, **options)`: (a trainer of 5 steps, the reward)."""
    file = tmp_path / "measured.py"
    file.write_text(PIECE)

    def make(over=None, **options):
        tree = {"run": {"steps": 5}, "rewards": ["verdict", {"name": f"{file}:Measured", **options}]}
        trainer = make_trainer(overlaid(tree, over or {}))
        return trainer, trainer.stages[0].scoring.terms[1].function

    return make


def test_the_policy_is_measured_before_the_first_step_and_every_two(with_measured):
    trainer, piece = with_measured()
    trainer.train()
    # Before the steps 0, 2 and 4, and before their rewards.
    assert piece.rewarded == [1, 1, 2, 2, 3]
    for number, rollouts in enumerate(piece.shown):
        assert len(rollouts) == 15
        assert {r.group: r.task.id for r in rollouts} == {r.group: r.task.id for r in piece.shown[0]}
        assert len({r.task.id for r in rollouts}) == 3
        # By the policy as it is then: its version counts the steps.
        assert {int(v) for r in rollouts for v in r.policy_version[r.sampled]} == {2 * number}
        np.testing.assert_array_equal(piece.values[number], [r.verdict.score for r in rollouts])
    texts = [[r.token_ids.tolist() for r in rollouts] for rollouts in piece.shown]
    assert texts[0] != texts[1]


def test_nothing_is_trained_on_them(with_measured, make_trainer):
    """The metrics of a run are those of one without a monitoring."""
    trainer, _ = with_measured()
    plain = make_trainer({"run": {"steps": 5}}, name="plain")
    rows = [timeless(run.train(), "run/", "memory/") for run in (trainer, plain)]
    for own, other in zip(*rows, strict=True):
        for name in ("grad_norm", "loss/total", "tokens/trained", "completion/length_mean", "reward/verdict"):
            assert own[name] == other[name], name


def test_all_tasks_are_measured_where_there_are_fewer(with_measured):
    trainer, piece = with_measured({"run": {"steps": 1}}, tasks=100)
    trainer.train()
    assert sorted({r.task.id for r in piece.shown[0]}) == sorted(task.id for task in trainer.stages[0].pool)


def test_a_run_that_samples_ahead_is_measured_too(with_measured):
    trainer, piece = with_measured({"rollout": {"staleness": 1}})
    trainer.train()
    assert piece.rewarded == [1, 1, 2, 2, 3]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(make_trainer):
    """The targets of `adaptive_length_target` are in the checkpoint, between two measurements."""
    rewards = ["verdict", {"name": "adaptive_length_target", "monitor_every": 3, "monitor_tasks": 4, "lower": 1}]
    over = {"run": {"steps": 5}, "rewards": [*rewards[:1], {**rewards[1], "interval": 1}]}
    whole = make_trainer(over, name="whole").train()
    first = make_trainer(over, name="parts")
    first.train(2)
    first.close()
    rest = make_trainer(over, name="parts", resume="auto").train()
    names = ("grad_norm", "loss/total", "reward/mean", "reward/adaptive_length_target")
    assert [[row[name] for name in names] for row in rest] == [[row[name] for name in names] for row in whole]


@pytest.mark.parametrize("option", ["every", "tasks", "samples"])
def test_numbers_below_one_are_refused(option):
    good = Monitoring(1, 1, 1)
    with pytest.raises(ValueError, match="at least 1"):
        dataclasses.replace(good, **{option: 0})


def test_an_option_below_one_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="monitor_every and monitor_tasks must be at least 1"):
        make_trainer({"rewards": ["verdict", {"name": "adaptive_length_target", "monitor_every": 0}]})
