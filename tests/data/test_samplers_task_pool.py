"""The pool keeps order, refuses what is given twice, and restores what changed."""

import json

import pytest

from rlvr.data import TaskPool
from rlvr.errors import CheckpointError, DataError
from rlvr.records import Task


def tasks(size=3):
    return [Task(f"t{i}", f"prompt {i}", info={"i": i}) for i in range(size)]


def grown():
    pool = TaskPool(tasks())
    pool.add(Task("new", [{"role": "user", "content": "x"}], answer=[1]))
    pool.replace(Task("t1", "rewritten"))
    pool.replace(Task("new", "again"))
    return pool


def test_order_and_lookup():
    pool = grown()
    assert [t.id for t in pool] == ["t0", "t1", "t2", "new"]
    assert [pool.at(i).id for i in range(len(pool))] == ["t0", "t1", "t2", "new"]
    assert (pool["t1"].prompt, pool["new"].prompt, "t9" in pool) == ("rewritten", "again", False)


def test_the_state_holds_only_what_changed_and_restores_it():
    assert TaskPool(tasks()).state_dict()["changed"] == []
    state = json.loads(json.dumps(grown().state_dict()))
    assert [row["id"] for row in state["changed"]] == ["new", "t1"]
    restored = grown()
    restored.add(Task("other", "dropped by the restore"))
    restored.load_state_dict(state)
    assert list(restored) == list(grown())
    assert restored.state_dict() == state


def test_the_fingerprint_is_of_the_loaded_tasks_in_order():
    assert grown().fingerprint == TaskPool(tasks()).fingerprint
    assert TaskPool(reversed(tasks())).fingerprint != TaskPool(tasks()).fingerprint


def test_a_checkpoint_of_other_tasks_is_refused():
    state = grown().state_dict()
    with pytest.raises(CheckpointError, match=f"other tasks: 3 with the fingerprint {state['fingerprint']}.*holds 4"):
        TaskPool(tasks(4)).load_state_dict(state)


def test_ids_given_twice_and_unknown_ones_are_refused():
    pool = grown()
    for twice in (lambda: TaskPool([*tasks(), *tasks(1)]), lambda: pool.add(Task("new", "x"))):
        with pytest.raises(DataError, match="given twice"):
            twice()
    with pytest.raises(DataError, match="no task 't9' to replace"):
        pool.replace(Task("t9", "x"))
    with pytest.raises(KeyError, match="t9"):
        pool["t9"]
