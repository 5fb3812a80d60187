"""Run folders under tmp_path, and a small run that trains in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvr.trainer import GRPOTrainer
from small_pieces import PIECES


@pytest.fixture
def pieces(tmp_path) -> Path:
    """A user's file with verifiers and other pieces."""
    path = tmp_path / "pieces.py"
    path.write_text(PIECES)
    return path


@pytest.fixture
def make_trainer(make_tree):
    """`make_trainer({section: {...}}, name="run", **parts)`: a trainer of that small run, closed after the test."""
    made = []

    def make(over=None, name="run", **parts):
        made.append(GRPOTrainer(config=make_tree(over, name), **parts))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
