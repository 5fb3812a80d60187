"""What an audit calls doubtful, and that it keeps little of much."""

from __future__ import annotations

import pytest

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers.audit.findings import SHOWN, FindingCase, Findings, doubts

TASK = Task(id="1", prompt="?", answer="42")


def case(status, score, completion="", answer=None, reason="", task=TASK, expected=None, seconds=0.0, name="1"):
    verdict = Verdict(VerdictStatus(status), score, reason, answer, seconds=seconds)
    return FindingCase(name, "mine", completion, verdict, expected, task)


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        (case("correct", 1.0, r"\boxed{42}", "42"), []),
        (case("wrong", 0.0, r"\boxed{41}", "41"), []),
        (case("timeout", 0.0), ["timeout"]),
        (case("timeout", None), ["timeout"]),
        (case("error", None), ["undecided"]),
        (case("error", None, task=None), ["undecided"]),
        (case("partial", 0.5), ["partial"]),
        (case("unparsable", 0.0, "it is 42"), ["unparsable, but the gold is in the text"]),
        (case("unparsable", 0.0, "it is 41"), []),
        (case("wrong", 0.0, "", r"\text{ 42 }"), ["wrong, but it reads like the gold"]),
        (case("correct", 1.0, r"\boxed{41} \boxed{42}", "42"), ["correct, with several different boxes"]),
        (case("correct", 1.0, r"\boxed{42} \boxed{ 42 }", "42"), []),
        (case("correct", 1.0, r"<think>\boxed{41}</think>\boxed{42}", "42"), []),
        (case("correct", 1.0, "42 " * 30, "42 " * 30), ["correct, but far longer than the gold"]),
        (
            case("correct", 1.0, "so it is 42 then", "42"),
            ["correct, but the answer is not marked: a fallback found it"],
        ),
        (case("correct", 1.0, " 42 ", "42"), []),
    ],
)
def test_what_is_doubtful(found, kinds):
    assert [kind for kind, _ in doubts(found)] == kinds


def test_only_the_slowest_and_the_first_are_kept_and_all_are_counted():
    findings = Findings()
    for number in range(1000):
        completion = "x" * 10_000
        findings.add(case("partial", 0.5, completion, seconds=(number * 7) % 1000, name=str(number)))
    assert [result.verdict.seconds for result in findings.slowest] == list(range(999, 999 - SHOWN, -1))
    assert [result.id for result, _ in findings.doubtful["partial"]] == [str(n) for n in range(SHOWN)]
    assert findings.doubts["partial"] == findings.rows == findings.counts["mine"]["partial"] == 1000
    assert max(len(result.completion) for result in findings.slowest) < 500


def test_agreement_counts_every_case_once():
    findings = Findings()
    for status, score in (("correct", 1.0), ("wrong", 0.0), ("partial", 0.9), ("error", None)):
        for expected in (True, False, None):
            findings.add(case(status, score, expected=expected, name=f"{status} {expected}"))
    result = findings.agreement
    accepts, rejects = (True, True), (False, False)
    counts = (result.counts[accepts], result.counts[rejects], result.undecided)
    assert counts == (1, 2, 2) and result.counts.total() + result.undecided == 8
    assert result.ids[True, False] == ["correct False"] and result.counts[True, False] == 1
    assert result.ids[False, True] == ["wrong True", "partial True"] and result.counts[False, True] == 2
