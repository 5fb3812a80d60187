"""Equal test-time compute: which results are paired, their budgets, and differences by hand."""

from __future__ import annotations

import json

import pytest

from rlvr.analysis.analysis_table import read_evaluated
from rlvr.analysis.budget import COLUMNS, budget_table
from rlvr.errors import DataError
from rlvr.evaluation import TaskResult


@pytest.fixture
def evaluated(tmp_path):
    """`evaluated(name, longest, scores, majority, best)`: an evaluation with 4 samples; values by task."""

    def make(name, longest, scores, majority, best=None):
        rows = []
        for n, (score, voted) in enumerate(zip(scores, majority, strict=True)):
            chosen = {} if best is None else {4: best[n]}
            rows.append(
                TaskResult(
                    f"t{n}", None, None, 4, 0, score, None, {4: voted}, chosen, responses=4, tokens=2 * longest
                ).to_json()
            )
        path = tmp_path / f"{name}-{longest}.json"
        path.write_text(json.dumps({"k": [1, 4], "sampling": {"max_new_tokens": longest}, "by_task": rows}))
        return read_evaluated(path)

    return make


def test_sides_are_compared_at_the_same_k_and_longest_response(evaluated):
    free = [evaluated("vf", 64, [0.2, 0.4], [0.0, 1.0]), evaluated("vf", 16, [0.1, 0.1], [0.0, 0.0])]
    based = [
        evaluated("vb", 16, [0.1, 0.3], [0.0, 1.0], [0.5, 1.0]),
        evaluated("vb", 64, [0.6, 0.6], [1.0, 1.0], [1.0, 1.0]),
        evaluated("vb", 256, [0.6, 0.6], [1.0, 1.0]),
    ]
    table = budget_table(free, based)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
    assert [(row["budget"], row["k"], row["longest"]) for row in rows] == [
        (16, 1, 16),
        (64, 1, 64),
        (64, 4, 16),
        (256, 4, 64),
    ]
    # One sample of each: means; four: the majority against the scorer's choice.
    assert (rows[1]["free by"], rows[1]["based by"], rows[2]["free by"], rows[2]["based by"]) == (
        *("mean", "mean", "maj@4", "best@4"),
    )
    assert rows[1]["free"] == pytest.approx(0.3) and rows[1]["difference"] == pytest.approx(0.3)
    assert rows[2]["difference"] == pytest.approx(0.75)
    # A response has half of its longest on average, and four are drawn.
    assert rows[2]["free tokens"] == 4 * 8 and rows[1]["based tokens"] == 32
    assert table.notes == ["Evaluated on one side alone, and left out: at most 256 tokens."]


def test_without_a_scorer_the_verifier_based_side_votes_too(evaluated):
    table = budget_table([evaluated("vf", 16, [0.0], [0.0])], [evaluated("vb", 16, [1.0], [1.0])], [4])
    assert [row[7] for row in table.rows] == ["maj@4"]


def test_what_has_no_common_budget_is_refused(evaluated, tmp_path):
    one = evaluated("vf", 16, [1.0], [1.0])
    with pytest.raises(DataError, match=r"\[16\] and \[64\] tokens"):
        budget_table([one], [evaluated("vb", 64, [1.0], [1.0])])
    with pytest.raises(DataError, match="both have responses of at most 16 tokens"):
        budget_table([one, one], [one])
    (tmp_path / "step.json").write_text(json.dumps({"step": 3, "by_task": [one.by_id["t0"].to_json()]}))
    with pytest.raises(DataError, match="does not say how long responses could be"):
        budget_table([one], [read_evaluated(tmp_path / "step.json")])
