"""logging.profile: a trace and a table for the steps that are named, and for no other."""

from __future__ import annotations

import copy
import errno
import json

import pytest

from rlvr import GRPOTrainer
from rlvr.monitor.profile import StepProfiler
from small_run import TREE


def evens(completion: str) -> float:
    return sum(c in "02468" for c in completion) / max(1, len(completion))


@pytest.mark.gate
def test_a_profiled_step_leaves_a_trace_of_all_threads_and_its_times(tmp_path):
    tree = copy.deepcopy(TREE)
    tree["run"] |= {"dir": str(tmp_path), "steps": 3}
    tree["logging"] |= {"profile": [2]}
    with GRPOTrainer(None, [{"prompt": "1+1="}, {"prompt": "2+2="}], evens, tree) as trainer:
        rows = trainer.train()
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2.json", "step-2.txt"]
    events = json.loads((folder / "step-2.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"phase/rollout", "phase/score", "phase/update", "phase/publish"} <= names
    assert len({event["tid"] for event in events if event.get("cat") == "cpu_op"}) >= 2  # the engine's thread and ours
    text = (folder / "step-2.txt").read_text()
    assert f"{rows[1]['time/update']:.4f} s" in text and "aten::" in text


@pytest.mark.gate
def test_a_profile_that_cannot_be_written_costs_the_profile_only(tmp_path, monkeypatch, caplog):
    tree = copy.deepcopy(TREE)
    tree["run"] |= {"dir": str(tmp_path), "steps": 2}
    tree["logging"] |= {"profile": [1]}

    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with GRPOTrainer(None, [{"prompt": "1+1="}, {"prompt": "2+2="}], evens, tree) as trainer:
        monkeypatch.setattr(StepProfiler, "_write", full)
        assert len(trainer.train()) == 2
    assert "the profile of step 1 could not be written to" in caplog.text
