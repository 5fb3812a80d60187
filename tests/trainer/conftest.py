"""Run folders under tmp_path, and a small run that trains in a fraction of a second."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from trainer_helpers import PIECES, TREE, overlaid, task_rows

from rlvr.trainer import GRPOTrainer


@pytest.fixture
def pieces(tmp_path) -> Path:
    """A user's file with verifiers and other pieces."""
    path = tmp_path / "pieces.py"
    path.write_text(PIECES)
    return path


@pytest.fixture
def make_tree(tmp_path, pieces):
    """`make_tree({section: {...}}, name="run")`: the tree of a small run laid under these values."""

    def make(over=None, name="run"):
        data = tmp_path / "tasks.jsonl"
        if not data.exists():
            data.write_text("".join(json.dumps(row) + "\n" for row in task_rows()))
        base = copy.deepcopy(TREE)
        base["run"] |= {"dir": str(tmp_path / "runs"), "name": name}
        base["data"] = {"train": str(data)}
        base["verifier"] = f"{pieces}:evens"
        return overlaid(base, over or {})

    return make


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
