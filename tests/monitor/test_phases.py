from __future__ import annotations

import time

import pytest

from rlvr.monitor import phases as module
from rlvr.monitor.phases import KNOWN, Phases


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_phases_add_up_and_nested_time_is_counted_once(clock):
    phases = Phases()
    clock(1)
    with phases("rollout"):
        clock(2)
        with phases("verify"):
            clock(4)
        clock(8)
    with phases("rollout"):
        clock(16)
    got = phases.finish()
    assert got["time/rollout"] == 26
    assert got["time/verify"] == 4
    assert got["time/update"] == 0
    assert got["time/step"] == 31
    assert got["time/unaccounted"] == 1
    assert set(got) == {*(f"time/{name}" for name in KNOWN), "time/step", "time/unaccounted"}


def test_a_new_step_starts_at_zero(clock):
    phases = Phases()
    with phases("update"):
        clock(5)
    phases.finish()
    clock(100)  # an evaluation
    phases.start()
    clock(1)
    assert phases.finish()["time/step"] == 1


def test_a_phase_that_raises_is_counted_and_closed(clock):
    phases = Phases()

    def score():
        with phases("score"):
            clock(3)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        score()
    clock(1)
    got = phases.finish()
    assert (got["time/score"], got["time/unaccounted"]) == (3, 1)


def test_an_unknown_phase_is_refused():
    with pytest.raises(KeyError, match="did you mean 'rollout'"), Phases()("rolout"):
        pass


def test_unaccounted_is_never_negative():
    phases = Phases()
    for _ in range(200):
        with phases("score"):
            time.sleep(0)
    assert phases.finish()["time/unaccounted"] >= 0
