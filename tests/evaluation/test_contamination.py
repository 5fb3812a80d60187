"""Contamination is a run of words that a task shares with the training data."""

from __future__ import annotations

import pytest

from rlvr.evaluation import contamination
from rlvr.records import Task


def words(*numbers: int) -> str:
    return " ".join(f"word{n}" for n in numbers)


def test_contamination_is_a_shared_run_of_words():
    train = [Task("a", words(*range(40))), Task("b", [{"role": "user", "content": "What is 2+2?"}])]
    held_out = [
        Task("copied", f"Tell me: {words(*range(5, 18)).upper().replace(' ', ', ')}!"),
        Task("one short", words(*range(5, 17), 99, 98)),
        Task("same short", [{"role": "user", "content": "what  is 2+2?"}]),
        Task("other sign", [{"role": "user", "content": "What is 2-2?"}]),
        Task("fresh", words(*range(100, 140))),
    ]
    got = contamination(train, held_out)
    assert {row["id"] for row in got["found"]} == {"copied", "same short"}
    assert (got["contaminated"], got["tasks"], got["share"]) == (2, 5, 0.4)
    overlaps = {row["id"]: row["overlap"] for row in got["found"]}
    assert overlaps["same short"] == 1.0 and overlaps["copied"] == pytest.approx(1 / 3)
    assert contamination(train, held_out, words=12)["contaminated"] == 3
    assert contamination([], held_out)["contaminated"] == 0
    assert contamination(train, [])["share"] is None
