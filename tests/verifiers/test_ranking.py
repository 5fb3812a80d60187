import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.ranking import RankingVerifier

WIKIPEDIA = {"D1": 3, "D2": 2, "D3": 3, "D4": 0, "D5": 1, "D6": 2, "D7": 3, "D8": 2}
"""The example of en.wikipedia.org/wiki/Discounted_cumulative_gain: six documents were ranked, D7 and D8 were not."""


def judge(answer, gold=WIKIPEDIA, candidates=None, **options):
    task = Task("t", "[D1] [D2] ...", gold, info={} if candidates is None else {"candidates": candidates})
    return RankingVerifier(**options).quick(task, f"<answer>{answer}</answer>")


def test_the_worked_example_of_ndcg():
    verdict = judge("D1 > D2 > D3 > D4 > D5 > D6", k=6, gain="linear")
    assert verdict.score == pytest.approx(6.861 / 8.740, abs=1e-4)
    assert verdict.status == VerdictStatus.PARTIAL
    assert verdict.scores["mrr"] == verdict.scores["hit"] == 1
    assert verdict.scores["recall"] == pytest.approx(5 / 7)


@pytest.mark.parametrize(
    "answer",
    [
        "[1] > [2] > [3]",
        "1 > 2 > 3",
        "1, 2, 3",
        "[1, 2, 3]",
        '["1", "2", "3"]',
        "1\n2\n3",
        "1. 1\n2. 2\n3. 3",
        "- 1\n- 2\n- 3",
        "[1], [2], [3]",
        "**1** > **2** > **3**",
        "1>2>3",
        "(1) [1]\n(2) [2]\n(3) [3]",
        "1 > 2 > 3.",
    ],
)
def test_lists_are_read_in_many_layouts(answer):
    verdict = judge(answer, {"1": 3, "2": 2, "3": 1})
    assert verdict.score == 1.0, verdict


@pytest.mark.parametrize(
    "answer",
    ["", "[]", "banana", "1 > 1 > 2", "[1, 1]", "1 > 2 > 9", "1 = 2 > 3", "1 > 2 = 3", "1 and 2", "1 > 2 > 3 or 3 > 2 > 1", "[[1], [2]]", "[1.0, 2]", "[true]", "1 2 3", "{}", "null", "> > >", ",", "1 > 2 >\n1"],
)  # fmt: skip
def test_repeated_unknown_and_tied_ids_earn_nothing(answer):
    assert judge(answer, {"1": 3, "2": 2, "3": 1}).score == 0.0


def test_options():
    gold = ["a", "b"]
    known = ["a", "b", "c", "d"]
    assert judge("c > a > d > b", gold, known, metric="recall", k=2).score == 0.5
    assert judge("c > a > d > b", gold, known, metric="mrr").score == 0.5
    assert judge("c > a", gold, known, metric="mrr", k=1).score == 0
    assert (
        judge("c > a", gold, known, metric="hit", k=2).score == 1
        and judge("c > a", gold, known, metric="hit", k=1).score == 0
    )
    assert judge("a > b", gold, known).score == 1
    assert judge("a > b", gold, known, complete=True).status == VerdictStatus.UNPARSABLE
    assert judge("b > a > c > d", gold, known, complete=True).score == 1
    assert (
        judge("c > a", gold, known, threshold=0.3).score == 1 and judge("c > a", gold, known, threshold=0.9).score == 0
    )
    assert judge("c > a", gold).score == 0
    for bad in ({"k": 0}, {"threshold": 0}):
        with pytest.raises(ConfigError, match="ranking"):
            RankingVerifier(**bad)
    assert RankingVerifier().same_answer("a>b", "a > b") and not RankingVerifier().same_answer("a>b", "b>a")


@pytest.mark.parametrize(
    ("gold", "candidates"),
    [
        (None, None),
        ([], None),
        ({}, None),
        ({"a": 0}, None),
        ({"a": -1}, None),
        ({"a": float("nan")}, None),
        ({"a": "3"}, None),
        ({"a": 10**400}, None),
        (["a", "a"], None),
        ("a", None),
        (["a"], ["b"]),
        (["a"], ["a", "a"]),
        (["a"], "a"),
    ],
)
def test_bad_tasks_are_found(gold, candidates):
    info = {} if candidates is None else {"candidates": candidates}
    assert RankingVerifier().check_task(Task("t", "p", gold, info=info))
    assert judge("a", gold, candidates).score is None


GRADES = st.dictionaries(st.sampled_from([f"d{i}" for i in range(8)]), st.integers(0, 4), min_size=1).filter(
    lambda g: any(g.values())
)


@settings(deadline=None)
@given(GRADES, st.data(), st.integers(1, 9), st.booleans())
def test_metrics_agree_with_float64_arrays_over_all_ids(grades, data, k, linear):
    order = data.draw(st.permutations(sorted(grades)))
    output = order[: data.draw(st.integers(1, len(order)))]
    verdict = judge(" > ".join(output), grades, k=k, gain="linear" if linear else "exponential")

    def dcg(values):
        values = np.asarray(values, dtype=np.float64)[:k]
        return float(((values if linear else np.exp2(values) - 1) / np.log2(np.arange(len(values)) + 2.0)).sum())

    grade = np.array([grades[identity] for identity in output])
    assert verdict.scores["ndcg"] == pytest.approx(dcg(grade) / dcg(sorted(grades.values())[::-1]))
    assert verdict.scores["recall"] == pytest.approx(
        np.count_nonzero(grade[:k]) / np.count_nonzero(list(grades.values()))
    )
    first = np.flatnonzero(grade[:k])
    assert verdict.scores["mrr"] == pytest.approx(1 / (first[0] + 1) if len(first) else 0)
    assert all(0 <= score <= 1 for score in verdict.scores.values())
    assert judge(json.dumps(output), grades, k=k, gain="linear" if linear else "exponential").scores == verdict.scores


@settings(deadline=None)
@given(GRADES)
def test_ties_among_the_grades_may_be_ranked_either_way(grades):
    best = sorted(grades, key=lambda identity: -grades[identity])
    other = sorted(grades, key=lambda identity: (-grades[identity], -int(identity[1:])))
    assert judge(", ".join(best), grades).score == judge("\n".join(other), grades).score == 1 or len(grades) > 10


@settings(deadline=None)
@given(st.text() | st.text("123[]>,\n =.", max_size=40))
def test_no_text_raises(text):
    assert 0 <= judge(text, {"1": 3, "2": 2, "3": 1}).score <= 1


@pytest.mark.parametrize(
    "text", ["1 > " * 250_000, "[" * 10**6, "\n" * 10**6, "1," * 9_000, "[" * 19_000, "9" * 19_000]
)
def test_long_answers_are_refused_at_once(text):
    start = time.process_time()
    assert judge(text, {"1": 3, "2": 2}).score == 0
    assert time.process_time() - start < 1
