"""Preference rows become questions for a judge."""

from __future__ import annotations

import pytest

from rlvr.data import load_tasks
from rlvr.errors import ConfigError, DataError
from rlvr.verifiers.base import as_verifier

ROWS = [
    {"id": f"r{i}", "prompt": f"ask {i}", "chosen": f"good {i}", "rejected": f"{{prompt}} bad {i}"} for i in range(40)
]


def test_the_answer_is_where_the_chosen_response_stands():
    tasks = load_tasks({"name": "preferences", "data": ROWS, "template": "{prompt}|{a}|{b}"})
    assert len(tasks) == 40
    for i, task in enumerate(tasks):
        asked, a, b = task.prompt[0]["content"].split("|")
        assert asked == f"ask {i}"
        assert {"A": a, "B": b}[task.answer] == f"good {i}"
        assert f"{{prompt}} bad {i}" in (a, b)  # a response that reads like a slot is left as it is
    assert 10 < sum(task.answer == "A" for task in tasks) < 30
    assert [t.prompt for t in load_tasks({"name": "preferences", "data": ROWS, "seed": 1})] != [
        t.prompt for t in load_tasks({"name": "preferences", "data": ROWS})
    ]


def test_both_orders_and_messages():
    row = {
        "prompt": [{"role": "user", "content": "ask"}],
        "chosen": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    tasks = load_tasks({"name": "preferences", "data": [row], "both_orders": True, "template": "{prompt}|{a}|{b}"})
    assert sorted((t.prompt[0]["content"], t.answer) for t in tasks) == [("ask|no|yes", "B"), ("ask|yes|no", "A")]
    assert all(as_verifier("label").check_task(t) is None for t in tasks)


def test_a_row_without_a_response_is_named():
    with pytest.raises((DataError, ConfigError), match="'r' has no 'rejected'"):
        load_tasks({"name": "preferences", "data": [{"id": "r", "prompt": "ask", "chosen": "x"}]})
