"""Run folders under tmp_path, and a small run that trains in a fraction of a second."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from replay_helpers import PIECES, TREE, overlaid, task_rows, weights

from rlvr.trainer import GRPOTrainer


@pytest.fixture
def pieces(tmp_path) -> Path:
    """A user's file with verifiers and other pieces."""
    path = tmp_path / "pieces.py"
    path.write_text(PIECES)
    return path


@pytest.fixture
def make_tree(tmp_path, pieces):
    """`make_tree({section: {...}}, name="run")`: the tree of a small run with these values laid over it."""

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
