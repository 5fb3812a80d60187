"""The parts of a run: none of them knows the trainer, and a checkpoint holds what each stateful one gives."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import rlvr
from rlvr.run.train_state import TrainState

SOURCE = Path(rlvr.__file__).parent


class Counter:
    """A stateful object."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_no_part_of_a_run_knows_the_trainer():
    """Not even for the type checker."""
    for path in (SOURCE / "run").rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not {"GRPOTrainer", "trainer"} & names, path.name


def test_the_trainer_stays_small():
    text = (SOURCE / "trainer.py").read_text()
    targets = [
        target
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    attributes = {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    assert len(attributes) < 20, sorted(attributes)
    assert len(text.splitlines()) <= 320


def test_the_counters_of_a_run_come_back_from_the_state_of_a_checkpoint():
    state = TrainState(step=7, version=6, stage_number=1, stage_step=3, nonfinite=1, evaluation_pending=True)
    state.metrics = [{"step": step} for step in range(1, 8)]
    saved = json.loads(json.dumps(state.state_dict()))
    # The names of the checkpoint format, which checkpoints of earlier versions have.
    assert set(saved) == {
        "step",
        "version",
        "stage_number",
        "stage_step",
        "nonfinite",
        "owes_evaluation",
        "logged",
    }
    loaded = TrainState()
    loaded.load_state_dict(saved)
    assert loaded.state_dict() == saved | {"logged": 0}
    assert loaded.first_step == 8


def test_a_checkpoint_holds_the_state_of_each_stateful_object(make_trainer):
    first, second = Counter(), Counter()
    trainer = make_trainer()
    trainer.checkpointer.stateful["counter"] = first
    first.count = 5
    trainer.train(1)
    state = json.loads((trainer.folder.checkpoints / "step-1" / "state.json").read_text())
    assert state["counter"] == {"count": 5}
    assert len(state["stages"]) == 1 and state["history"] is not None
    trainer.close()
    again = make_trainer()
    again.checkpointer.stateful["counter"] = second
    again.load(trainer.folder.checkpoints / "step-1")
    assert second.count == 5 and again.step == 1
