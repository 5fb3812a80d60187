"""Changes under help in the prompt: differences by hand, the paper's question as a case, and bad input."""

from __future__ import annotations

import json

import pytest

from rlvr.analysis.ability import ability_table
from rlvr.analysis.analysis_table import read_evaluated
from rlvr.errors import ConfigError, DataError
from rlvr.evaluation import TaskResult


@pytest.fixture
def evaluated(tmp_path):
    """`evaluated({"base/plain": [score of each task]})`: evaluations of tasks of level 1, 1, 2, 2."""

    def make(scores, levels=(1, 1, 2, 2)):
        found = {}
        for name, values in scores.items():
            path = tmp_path / f"{name.replace('/', '-')}.json"
            rows = [
                TaskResult(f"t{n}", None, level, 8, 0, score).to_json()
                for n, (score, level) in enumerate(zip(values, levels, strict=False))
            ]
            path.write_text(json.dumps({"by_task": rows}))
            found[tuple(name.split("/"))] = read_evaluated(path)
        return found

    return make


def test_a_plan_that_costs_the_tuned_model_less_on_hard_tasks(evaluated):
    """The paper's finding in numbers made by hand: on level 2 the plan lowers the base model by 0.4, the tuned one by
    0.1, so that the tuned model's change is 0.3 above."""
    scores = {
        "base/plain": [0.8, 0.6, 0.5, 0.5],
        "base/plan": [0.9, 0.7, 0.1, 0.1],
        "tuned/plain": [0.9, 0.9, 0.7, 0.7],
        "tuned/plan": [0.9, 0.9, 0.6, 0.6],
    }
    table = ability_table(evaluated(scores))
    assert table.columns[-4:] == ["change", "change 95 %", "beyond", "beyond 95 %"]
    rows = {tuple(row[0:1] + row[2:4]): row for row in table.rows}
    assert [row[0] for row in table.rows[::4]] == ["all", "difficulty/1", "difficulty/2"]
    hard = rows["difficulty/2", "tuned", "plan"]
    assert hard[1] == 2
    assert hard[4] == pytest.approx(0.6) and hard[5] == pytest.approx(-0.1) and hard[7] == pytest.approx(0.3)
    # Both tasks agree, so every resample of tasks has the same mean.
    assert hard[6] == pytest.approx((-0.1, -0.1)) and hard[8] == pytest.approx((0.3, 0.3))
    assert rows["difficulty/2", "base", "plan"][5] == pytest.approx(-0.4)
    assert rows["difficulty/1", "base", "plan"][5] == pytest.approx(0.1)
    # Neither without help nor of the first model is there anything to compare.
    assert rows["all", "tuned", "plain"][5:] == [None] * 4
    assert rows["all", "base", "plan"][7:] == [None] * 2


def test_one_model_alone_has_no_column_for_another(evaluated):
    table = ability_table(evaluated({"base/plain": [0.5] * 4, "base/knowledge": [1.0] * 4}))
    assert table.columns[-1] == "change 95 %"
    assert table.rows[1][5] == pytest.approx(0.5)


def test_tasks_that_one_evaluation_lacks_are_left_out_of_all(evaluated):
    table = ability_table(evaluated({"base/plain": [0.0, 0.0, 0.0, 1.0], "base/plan": [1.0, 1.0]}))
    assert table.rows[0][1] == 2 and table.rows[0][4] == 0.0
    assert "2 tasks that not every evaluation has are left out." in table.notes


def test_what_cannot_be_compared_is_refused(evaluated):
    with pytest.raises(ConfigError, match="there is no result for tuned/plan"):
        ability_table(evaluated({"base/plain": [1], "base/plan": [1], "tuned/plain": [1]}))
    with pytest.raises(DataError, match="has no greedy"):
        ability_table(evaluated({"base/plain": [1], "base/plan": [1]}), "greedy")
