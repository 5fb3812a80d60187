"""Small runs compute what they computed when they were recorded: to the last bit on the same processor with the same
torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_runs import BATCHED_BY_TIME, RECORDED, RUNS, machine, measure

FOUND = json.loads(RECORDED.read_text())
CLOSE = {"rel": 1e-3, "abs": 1e-5}
"""Between processors and versions of torch, sums are added in another order: single precision, over a few updates."""


@pytest.mark.gate
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "two ranks" else ()) for name in RUNS]
)
def test_a_run_is_as_it_was_recorded(name: str, tmp_path) -> None:
    now, then = json.loads(json.dumps(measure(name, tmp_path))), FOUND["runs"][name]
    if machine() == FOUND["machine"] and name not in BATCHED_BY_TIME:
        assert changed(now, then) == {}
        assert now == then
        return
    assert now["rollouts"] == then["rollouts"]
    assert now["norms"] == pytest.approx(then["norms"], **CLOSE)
    for kind in ("metrics", "evaluations"):
        assert len(now[kind]) == len(then[kind])
        for mine, recorded in zip(now[kind], then[kind], strict=True):
            assert words(mine) == words(recorded)
            assert numbers(mine) == pytest.approx(numbers(recorded), **CLOSE)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def words(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in numbers(row)}


def changed(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """The first value of each metric that differs, as (step, now, then)."""
    result: dict[str, Any] = {}
    for mine, recorded in zip(now["metrics"], then["metrics"], strict=True):
        for name in mine.keys() | recorded.keys():
            if mine.get(name) != recorded.get(name):
                result.setdefault(name, (recorded["step"], mine.get(name), recorded.get(name)))
    return result
