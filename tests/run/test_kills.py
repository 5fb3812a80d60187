"""SIGKILL in every phase of a run, then --resume auto: the run is the one that was never killed, bit for bit (N8)."""

from __future__ import annotations

import random
import time

import pytest
from resume_helpers import Run, assert_same, kill_at, make_tree, merged

pytestmark = pytest.mark.alone

PHASES = ("sampling", "verifying", "updating", "publishing", "saving", "evaluating")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never killed."""
    folder = tmp_path_factory.mktemp("whole")
    with Run(make_tree(folder, "whole"), resume=None) as run:
        assert run.end() == 0, run.said()
        assert run.lines() == 20
        return run.folder


def go_through(folder, kills, whole):
    """A run that is killed at each (phase, count, delay), resumed every time, and let go to its end.

    Where it is killed before its first checkpoint, it begins again.
    """
    tree = make_tree(folder, "killed", run={"overwrite": True})
    for phase, count, delay in kills:
        with Run(tree) as run:
            kill_at(run, phase, count, delay)
    with Run(tree) as run:
        assert run.end() == 0, run.said()
    assert_same(run.folder, whole)


def moments(seed, phases):
    """For each phase how often it is come to, and how long after that the kill comes."""
    source = random.Random(seed)
    most = {"verifying": 12, "updating": 4, "publishing": 4, "evaluating": 3, "sampling": 2, "saving": 1}
    return [
        (phase, source.randint(1, most[phase]), source.uniform(0.0, 0.02 if phase == "saving" else 0.03))
        for phase in phases
    ]


def test_six_kills_one_in_each_phase(tmp_path, whole):
    go_through(tmp_path, moments(0, PHASES), whole)


@pytest.mark.slow
def test_kills_at_random_moments_under_the_default_checkpoints(tmp_path, whole):
    """By the clock, with `checkpoint.minutes` shorter than 10 so that some fall into the run; the first kill comes
    before any."""
    source = random.Random(7)
    tree = make_tree(tmp_path, "killed", checkpoint={"every": 0, "minutes": 0.001})
    with Run(merged(tree, {"checkpoint": {"minutes": 10.0}})) as run:
        assert run.wait(lambda: run.lines() >= 3)
        run.kill()
    before = run.lines()
    with Run(tree) as run:
        assert run.end() == 2
        assert f"holds {before} steps and no checkpoint to go on from: they would be lost" in run.said()
    with Run(merged(tree, {"run": {"overwrite": True}})) as run:
        assert run.wait(lambda: any((run.folder / "checkpoints").glob("step-*")))
        time.sleep(source.uniform(0.0, 0.5))
        run.kill()
    assert len(list(run.folder.parent.glob("killed.old-*"))) == 1
    for _ in range(2):
        with Run(tree) as run:
            run.wait(lambda run=run: run.lines() > run._lines + 1)
            time.sleep(source.uniform(0.0, 0.3))
            run.kill()
    with Run(tree) as run:
        assert run.end() == 0, run.said()
    assert_same(run.folder, whole, by_clock=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_twenty_kills_at_random_moments(tmp_path, whole, seed):
    """Five in each of four runs."""
    go_through(tmp_path, moments(seed, random.Random(100 + seed).choices(PHASES, k=5)), whole)
