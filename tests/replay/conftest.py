"""Run folders under tmp_path, and a small run that trains in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import pytest
from replay_helpers import PIECES

from rlvr.trainer import GRPOTrainer
from small_run import overlaid, weights


@pytest.fixture
def pieces(tmp_path) -> Path:
    """A user's file with verifiers and other pieces."""
    path = tmp_path / "pieces.py"
    path.write_text(PIECES)
    return path


@pytest.fixture
def run(make_tree):
    """`run({section: {...}}, name="run")`: the trainer of that small run, after training; closed after the test."""
    made = []

    def go(over=None, name="run", **parts):
        made.append(GRPOTrainer(config=make_tree(over, name), **parts))
        made[-1].start = weights(made[-1])
        made[-1].train()
        return made[-1]

    yield go
    for trainer in made:
        trainer.close()


@pytest.fixture
def again(run):
    """`again(trainer, over, **engine options)`: the run trained anew from what it recorded."""

    def go(recorded, over=None, name="again", **options):
        engine = {"name": "recorded", "path": str(recorded.folder.path), **options}
        return run(overlaid(over or {}, {"rollout": {"engine": engine}}), name)

    return go
