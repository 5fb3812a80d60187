"""Two evaluations compared task by task."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr.errors import DataError
from rlvr.evaluation import compare
from rlvr.evaluation.task_result import TaskResult


def result_of(name: str, correct: int, greedy: float | None = None, samples: int = 8) -> TaskResult:
    return TaskResult(name, samples=samples, correct=correct, score=correct / samples, greedy=greedy, responses=samples)


def test_a_comparison_is_paired_by_task():
    random = np.random.default_rng(0)
    chances = random.random(200)
    before = [result_of(f"t{i}", int(random.binomial(8, p))) for i, p in enumerate(chances)]
    after = [result_of(f"t{i}", int(random.binomial(8, min(p + 0.1, 1)))) for i, p in enumerate(chances)]
    random.shuffle(after)  # type: ignore[arg-type]
    result = compare(before, after, [1, 8])["differences"]["mean"]
    by_id = {t.id: t for t in after}
    changes = np.asarray([by_id[t.id].score - t.score for t in before])
    assert result["difference"] == pytest.approx(changes.mean())
    assert (result["better"], result["worse"]) == (int((changes > 0).sum()), int((changes < 0).sum()))
    low, high = result["interval"]
    error = 1.96 * changes.std() / math.sqrt(200)
    assert (low, high) == (
        pytest.approx(changes.mean() - error, abs=0.006),
        pytest.approx(changes.mean() + error, abs=0.006),
    )
    scores = [np.asarray([t.score for t in which]) for which in (before, by_id.values())]
    assert high - low < 0.7 * 2 * 1.96 * math.sqrt(sum(s.var() for s in scores) / 200)  # pairing is worth having


def test_support_says_what_was_gained_and_lost():
    before = [
        result_of("both", 1),
        result_of("lost", 2),
        result_of("gained", 0),
        result_of("neither", 0),
        result_of("gone", 3),
    ]
    after = [
        result_of("both", 8),
        result_of("lost", 0),
        result_of("gained", 0, greedy=1.0),
        result_of("neither", 0),
        result_of("new", 1),
    ]
    got = compare(before, after, [1])
    support = got["support"]
    assert (support["both"], support["gained"], support["lost"], support["neither"]) == (1, 1, 1, 1)
    assert (support["gained_ids"], support["lost_ids"]) == (["gained"], ["lost"])
    assert (got["tasks"], got["only_before"], got["only_after"]) == (4, 1, 1)
    with pytest.raises(DataError, match="no task in common"):
        compare(before, [result_of("other", 1)], [1])
