"""Schedules, controllers and the learning rate."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rlvr.config import OptimConfig
from rlvr.core.schedules import (
    Controller,
    Scalar,
    Schedule,
    StepSchedule,
    at,
    controllers,
    least_value,
    scalar_value,
)
from rlvr.stages.stage_base import learning_rate

ROOT = 2**-0.5


@pytest.mark.parametrize(
    ("shape", "over", "want"),
    [
        # start 1, end 3, a stage of 8 steps; at steps 0, 2, 4, 6, 8, 20
        ("linear", None, [1, 1.5, 2, 2.5, 3, 3]),
        ("linear", 4, [1, 2, 3, 3, 3, 3]),
        ("linear", 16, [1, 1.25, 1.5, 1.75, 2, 3]),
        ("cosine", None, [1, 2 - ROOT, 2, 2 + ROOT, 3, 3]),
        ("cosine", 4, [1, 2, 3, 3, 3, 3]),
    ],
)
def test_schedules_by_hand(shape, over, want):
    schedule = Schedule(schedule=shape, start=1, end=3, over=over)
    got = [scalar_value(schedule, step, 8) for step in (0, 2, 4, 6, 8, 20)]
    assert got == pytest.approx(want, rel=1e-12)


@given(
    shape=st.sampled_from(["linear", "cosine"]),
    start=st.floats(-5, 5),
    end=st.floats(-5, 5),
    steps=st.integers(1, 50),
    over=st.none() | st.integers(1, 60),
)
def test_a_schedule_goes_from_start_to_end_without_turning(shape, start, end, steps, over):
    schedule = Schedule(schedule=shape, start=start, end=end, over=over)
    values = [schedule.value(step, steps) for step in range(100)]
    assert values[0] == start
    assert values[-1] == pytest.approx(end, abs=1e-12)
    signs = {math.copysign(1, b - a) for a, b in itertools.pairwise(values) if abs(b - a) > 1e-12}
    assert len(signs) <= 1


def test_a_stage_without_steps_is_no_division_by_zero():
    assert Schedule(schedule="linear", start=1, end=2).value(0, 0) == 1


def test_values_at_steps():
    schedule = StepSchedule(at={10: 0.5, 0: 1.0, 3: 2.0})
    assert [schedule.value(step, 99) for step in (0, 2, 3, 9, 10, 1000)] == [1.0, 1.0, 2.0, 2.0, 0.5, 0.5]
    with pytest.raises(ValidationError, match="step 0"):
        StepSchedule(at={1: 1.0})


def controller(**options):
    return Controller(**{"metric": "kl/ref", "target": 0.5, "initial": 2.0, "gain": 0.1, **options})


@pytest.mark.parametrize(
    ("measured", "gain", "want"),
    [
        (0.5, 0.1, 2.0),
        (0.55, 0.1, 2.0 * (1 + 0.1 * 0.1)),  # a tenth over
        (0.45, 0.1, 2.0 * (1 - 0.1 * 0.1)),
        (50.0, 0.1, 2.0 * 1.02),  # the error is clipped at 0.2
        (0.0, 0.1, 2.0 * 0.98),
        (50.0, -0.1, 2.0 * 0.98),
        (None, 0.1, 2.0),
        (math.nan, 0.1, 2.0),
        (math.inf, 0.1, 2.0),
    ],
)
def test_a_controller_by_hand(measured, gain, want):
    driven = controller(gain=gain)
    driven.observe({"kl/ref": measured, "other": 7.0})
    assert driven.current == pytest.approx(want, rel=1e-12)
    assert scalar_value(driven, 3, 10) == driven.current
    driven.observe({})
    assert driven.current == pytest.approx(want, rel=1e-12)


@given(measured=st.lists(st.floats(-10, 10), max_size=30), gain=st.floats(-1, 1))
def test_a_controller_stays_within_its_limits_and_comes_back_from_its_state(measured, gain):
    driven = controller(gain=gain, minimum=1.9, maximum=2.3)
    for value in measured:
        before = driven.current
        driven.observe({"kl/ref": value})
        assert 1.9 <= driven.current <= 2.3
        assert abs(driven.current - before) <= 0.2 * abs(gain) * before + 1e-12
        assert (driven.current - before) * (value - 0.5) * gain >= 0
    other = controller(gain=gain, minimum=1.9, maximum=2.3)
    other.load_state_dict(driven.state_dict())
    for each in (driven, other):
        each.observe({"kl/ref": 0.6})
    assert driven.current == other.current


def test_a_controller_holds_its_metric_at_the_target():
    """A plant whose metric is inversely proportional to the coefficient settles at the target."""
    driven = controller(initial=0.01, gain=0.5)
    for _ in range(300):
        driven.observe({"kl/ref": 0.1 / driven.current})
    assert 0.1 / driven.current == pytest.approx(0.5, rel=1e-3)


@dataclass(frozen=True)
class Piece:
    a: Scalar = 1.0
    b: Scalar = 2.0
    name: str = "piece"


def test_at_gives_plain_numbers_and_leaves_the_piece_alone():
    driven = controller()
    piece = Piece(Schedule(schedule="linear", start=0, end=1), driven)
    now = at(piece, 5, 10)
    assert (now.a, now.b, now.name) == (0.5, 2.0, "piece")
    assert isinstance(piece.a, Schedule)
    driven.observe({"kl/ref": 50.0})
    assert at(piece, 5, 10).b == pytest.approx(2.04)
    plain = Piece()
    assert at(plain, 5, 10) is plain
    assert at("no piece", 5, 10) == "no piece"
    assert at(Piece, 5, 10) is Piece
    assert list(controllers(piece, plain, "no piece", dataclasses.replace(piece, a=controller()))) == [
        driven,
        controller(),
        driven,
    ]


def test_a_scalar_as_the_configuration_writes_it():
    read = TypeAdapter(Scalar).validate_python
    assert read(0.2) == 0.2
    assert isinstance(read({"schedule": "cosine", "start": 1, "end": 0, "over": 5}), Schedule)
    assert read({"at": {"0": 1, "4": 0.5}}).value(4, 9) == 0.5
    assert read({"metric": "entropy", "target": 1.0, "initial": 0.01, "gain": -0.1}).current == 0.01
    for wrong in ({"schedule": "linear", "start": 1}, {"at": {}}, {"metric": "entropy", "target": 0, "initial": 1}):
        with pytest.raises(ValidationError):
            read(wrong)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        # peak 8, a stage of 10 steps, at steps 0 1 2 3 6 9
        ({}, [8, 8, 8, 8, 8, 8]),
        ({"warmup_steps": 4}, [2, 4, 6, 8, 8, 8]),
        ({"schedule": "linear"}, [8, 7.2, 6.4, 5.6, 3.2, 0.8]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr": 4}, [4, 8, 8, 7.5, 6, 4.5]),
        (
            {"schedule": "cosine", "warmup_steps": 2},
            [4, 8, 8, 4 + 4 * math.cos(math.pi / 8), 4, 4 - 4 * math.cos(math.pi / 8)],
        ),
        ({"schedule": "cosine", "min_lr": 8}, [8, 8, 8, 8, 8, 8]),
        ({"schedule": "linear", "warmup_steps": 20}, [0.4, 0.8, 1.2, 1.6, 2.8, 4.0]),
    ],
)
def test_the_learning_rate(options, want):
    config = OptimConfig(lr=8, **options)
    assert [learning_rate(config, step, 10) for step in (0, 1, 2, 3, 6, 9)] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_is_positive_on_every_step_of_the_stage(schedule):
    for steps in (1, 2, 7):
        for warmup in (0, 1, 3, 9):
            config = OptimConfig(lr=1e-6, schedule=schedule, warmup_steps=warmup)
            assert all(0 < learning_rate(config, step, steps) <= 1e-6 for step in range(steps))


# Steps of one size


@pytest.mark.parametrize(
    ("delta", "measured", "want"),
    [
        (0.25, [0.6, 0.7, 0.4], [2.25, 2.5, 2.25]),
        (-0.25, [0.6, 0.7, 0.4, 0.1], [1.75, 1.5, 1.75, 2.0]),
        (-0.25, [0.5], [2.25]),  # at its target it is not above it
        (0.25, [None, math.nan], [2.0, 2.0]),
        (-5.0, [0.6, 0.4], [0.0, 3.0]),  # bounded at 0 and at the maximum
    ],
)
def test_a_controller_of_equal_steps(delta, measured, want):
    driven = Controller(metric="entropy", target=0.5, initial=2.0, delta=delta, maximum=3.0)
    got = []
    for value in measured:
        driven.observe({"entropy": value})
        got.append(driven.current)
    assert got == want


def test_it_may_leave_zero_which_a_proportional_one_cannot():
    driven = Controller(metric="entropy", target=0.5, initial=0.0, delta=-0.005)
    plain = Controller(metric="entropy", target=0.5, initial=0.0, gain=-1.0)
    for one in (driven, plain):
        one.observe({"entropy": 0.1})
    assert (driven.current, plain.current) == (0.005, 0.0)


def test_an_idle_controller_is_0_where_the_metric_is_and_goes_on_from_its_value():
    """Skywork-OR1: the coefficient moves by delta, and weighs only while the entropy is not above its target."""
    driven = Controller(metric="entropy", target=0.2, initial=0.01, delta=-0.005, idle=True)
    seen = []
    for entropy in (0.1, 0.3, 0.1):
        driven.observe({"entropy": entropy})
        seen.append(driven.current)
    assert seen == pytest.approx([0.015, 0.0, 0.015])
    again = Controller(metric="entropy", target=0.2, initial=0.01, delta=-0.005, idle=True)
    driven.observe({"entropy": 0.3})
    again.load_state_dict(driven.state_dict())
    for one in (driven, again):
        one.observe({"entropy": 0.1})
    assert driven.current == again.current == pytest.approx(0.015)
    again.load_state_dict({"current": 0.5})  # a checkpoint from before there was `idle`
    assert again.current == 0.5


@pytest.mark.parametrize("options", [{"delta": 0.0}, {"idle": True}, {"delta": 0.1, "gain": 0.2}], ids=str)
def test_ways_to_move_that_contradict_each_other(options):
    with pytest.raises(ValidationError, match="delta"):
        Controller(metric="entropy", target=0.2, initial=0.01, **options)


def test_a_controller_whose_factor_may_be_0_is_bounded_by_its_minimum_alone():
    for gain, least in ((-4.9, True), (4.9, True), (-5.0, False), (6.0, False)):
        scalar = Controller(metric="entropy", target=1.0, initial=1.0, gain=gain)
        assert (least_value(scalar) > 0) == least
        scalar.observe({"entropy": 9.0 if gain < 0 else 0.01})
        assert (scalar.current > 0) == least
