"""combine: what is paid, what stays undecided, what is run, and what is refused when it is made."""

from __future__ import annotations

import asyncio
import os
from itertools import product

import pytest
from hostile_verifiers import InProcess
from hypothesis import given
from hypothesis import strategies as st

from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers import CombineVerifier, Verifier, VerifierPool, as_verifier, judged
from rlvr.verifiers.base import judged_group
from rlvr.verifiers.pool import Verification

TASK = Task(id="1", prompt="6 * 7?", answer="42", source="sums")


class Says(Verifier):
    """Gives one verdict whatever it is asked, and counts how often."""

    def __init__(self, score, status=None, answer=None, problem=None):
        self.verdict = Verdict.from_score(score, answer=answer)
        if status is not None:
            self.verdict = Verdict(status, score, answer=answer)
        self.problem, self.asked = problem, 0

    def verify(self, task, completion):
        self.asked += 1
        return self.verdict

    def check_task(self, task):
        return self.problem


def verdict_of(how, *scores, weights=None):
    parts = [Says(score) for score in scores]
    if weights:
        parts = [{"name": part, "weight": weight} for part, weight in zip(parts, weights, strict=True)]
    return asyncio.run(CombineVerifier(parts, how).verify(TASK, ""))


@pytest.mark.parametrize(
    ("how", "scores", "weights", "status", "score"),
    [
        ("weighted", (1, 0), (0.8, 0.2), "partial", 0.8),
        ("weighted", (1, 1, 1), (0.1, 0.2, 0.7), "correct", 1.0),
        ("weighted", (1, 1), (1, 0.5), "correct", 1.5),
        ("weighted", (0, 0), (0.8, 0.2), "wrong", 0.0),
        ("weighted", (1, 0), None, "partial", 0.5),
        ("weighted", (1, 0), (1, -0.5), "correct", 1.0),
        ("weighted", (1, 1), (1, -0.5), "partial", 0.5),
        ("weighted", (0, 1), (1, -0.5), "partial", -0.5),
        ("weighted", (None, 1), (0.5, 0.5), "error", None),
        ("weighted", (None, 1), (0, 1), "correct", 1.0),
        ("all", (1, 1), None, "correct", 1.0),
        ("all", (1, 0.5), None, "partial", 0.5),
        ("all", (1, 0), None, "wrong", 0.0),
        ("all", (None, 0), None, "wrong", 0.0),
        ("all", (None, 1), None, "error", None),
        ("any", (0, 1), None, "correct", 1.0),
        ("any", (None, 1), None, "correct", 1.0),
        ("any", (None, 0.5), None, "error", None),
        ("any", (0, 0), None, "wrong", 0.0),
        ("gated", (1, 0.5), None, "partial", 0.5),
        ("gated", (1, 1), None, "correct", 1.0),
        ("gated", (0.9, 1), None, "wrong", 0.0),
        ("gated", (None, 1), None, "error", None),
        ("gated", (0, None), None, "wrong", 0.0),
        ("gated", (1, None), None, "error", None),
    ],
)
def test_what_is_paid(how, scores, weights, status, score):
    verdict = verdict_of(how, *scores, weights=weights)
    assert (verdict.status, verdict.score) == (status, score)


@pytest.mark.parametrize("how", ["all", "any"])
def test_an_undecided_part_matters_only_where_it_could_change_the_score(how):
    """Against every value that the undecided parts could have taken."""
    values, pick = (0.0, 0.5, 1.0), {"all": min, "any": max}[how]
    for scores in product((None, *values), repeat=3):
        possible = {pick(filled) for filled in product(*(values if score is None else (score,) for score in scores))}
        verdict = verdict_of(how, *scores)
        assert verdict.score == (possible.pop() if len(possible) == 1 else None), scores


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), min_size=1, max_size=5), st.randoms())
def test_the_order_of_parts_changes_no_weighted_sum(pairs, random):
    verdict = verdict_of("weighted", *(s for s, _ in pairs), weights=[w for _, w in pairs])
    shuffled = random.sample(pairs, len(pairs))
    again = verdict_of("weighted", *(s for s, _ in shuffled), weights=[w for _, w in shuffled])
    assert verdict.score == pytest.approx(sum(s * w for s, w in pairs), abs=1e-8)
    assert (again.score, again.status) == (pytest.approx(verdict.score, abs=1e-8), verdict.status)


@pytest.mark.parametrize("status", ["timeout", "unparsable", "error"])
def test_a_zero_is_called_after_what_failed(status):
    parts = [Says(0.0), Says(0.0, VerdictStatus(status))]
    for how in ("weighted", "all", "any"):
        assert asyncio.run(CombineVerifier(parts, how).verify(TASK, "")).status == status


def test_a_failed_gate_runs_nothing_behind_it():
    gate, rest = Says(0.0, VerdictStatus.UNPARSABLE), Says(1.0)
    verdict = asyncio.run(CombineVerifier([gate, rest], "gated").verify(TASK, ""))
    assert (verdict.status, verdict.score, rest.asked) == ("unparsable", 0.0, 0)
    assert asyncio.run(CombineVerifier([rest, gate], "gated").verify(TASK, "")).score == 0.0
    assert rest.asked == gate.asked - 1 == 1


def test_scores_answer_and_reason_say_what_the_parts_said():
    parts = {"form": Says(1.0), "sum": Says(0.5, answer="41"), "lost": {"name": Says(None), "weight": 0}}
    parts = {**parts, "form": {"name": parts["form"], "weight": 1}, "sum": {"name": parts["sum"], "weight": 3}}
    inner = CombineVerifier(parts)
    verdict = asyncio.run(CombineVerifier([inner, Says(1.0), Says(0.0)]).verify(TASK, ""))
    assert verdict.scores == {
        "CombineVerifier": 2.5,
        "CombineVerifier/form": 1.0,
        "CombineVerifier/sum": 0.5,
        "Says": 1.0,
        "Says_2": 0.0,
    }
    assert verdict.answer == "41"
    assert verdict.reason.startswith("CombineVerifier: form: correct; sum: partial; lost: no score was given")


SOURCES = {"sums": Says(1.0), "words": Says(0.0)}


def test_a_task_goes_to_the_part_of_its_source():
    verifier = CombineVerifier(SOURCES, "routed")
    for source, score in (("sums", 1.0), ("words", 0.0)):
        assert asyncio.run(verifier.verify(Task("1", "?", source=source), "")).score == score


@pytest.mark.parametrize("source", ["maps", None])
def test_a_source_without_a_part_is_found_when_tasks_are_checked(source):
    task = Task("1", "?", source=source)
    verifier = CombineVerifier(SOURCES, "routed")
    assert f"no part for the source {source!r} (it has sums, words)" in verifier.check_task(task)
    assert asyncio.run(verifier.verify(task, "")).score is None
    rest = CombineVerifier({**SOURCES, "default": Says(0.25)}, "routed")
    assert rest.check_task(task) is None
    assert asyncio.run(rest.verify(task, "")).score == 0.25


def test_checks_of_tasks_are_those_of_the_parts_that_judge_it():
    bad, good = Says(1.0, problem="the gold is gone"), Says(1.0)
    assert CombineVerifier({"a": good, "b": bad}).check_task(TASK) == "b: the gold is gone"
    assert CombineVerifier({"sums": good, "b": bad}, "routed").check_task(TASK) is None


def test_two_answers_are_the_same_where_a_part_says_so():
    verifier = CombineVerifier(["exact", {"name": "exact", "casefold": True}], "any")
    assert verifier.same_answer("Oslo", "oslo")
    assert not verifier.same_answer("Oslo", "Rome")


def test_the_form_of_the_configuration():
    written = {
        "name": "combine",
        "how": "gated",
        "parts": [
            {"name": "exact", "casefold": True},
            {"name": "math", "weight": 0.8},
            {"name": "exact", "weight": 0.2},
        ],
    }
    verifier = as_verifier(written)
    assert list(verifier.verifiers) == ["exact", "math", "exact_2"]
    assert verifier.weights == {"exact": 0.0, "math": 0.8, "exact_2": 0.2}
    assert verifier.verifiers["exact"].casefold


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": []}, "at least one part"),
        ({"parts": ["exact"], "how": "routed"}, "mapping"),
        ({"parts": ["exact"], "how": "gated"}, "a gate and at least one part"),
        ({"parts": ["exact"], "how": "most"}, "how='most'"),
        ({"parts": ["exakt"]}, "did you mean 'exact'"),
        ({"parts": [{"name": "exact", "casefolds": True}]}, "did you mean 'casefold'"),
        ({"parts": [{"weight": 1}]}, "needs a `name`"),
        ({"parts": [{"name": "exact", "weight": "heavy"}]}, "not a finite number"),
        ({"parts": [{"name": "exact", "weight": float("inf")}]}, "not a finite number"),
        ({"parts": [{"name": "exact", "weight": 1}, "math"]}, "to each, or to none"),
        ({"parts": [{"name": "exact", "weight": 0}]}, "nothing could ever be paid"),
        ({"parts": [{"name": "exact", "weight": 1}], "how": "all"}, "takes no weights"),
        ({"parts": [{"name": "exact", "weight": 1}, "math"], "how": "gated"}, "the gate"),
        ({"parts": [{"name": Says(1.0), "casefold": True}]}, "made already"),
        ({"parts": [3]}, "a part is a verifier"),
        ({}, "needs the option 'parts'"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_words(options, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        registry.build("verifier", {"name": "combine", **options})


def test_a_part_that_raises_leaves_the_whole_undecided():
    def broken(completion):
        raise ValueError("no")

    verifier = CombineVerifier({"ok": Says(1.0), "broken": broken})
    verdict = asyncio.run(judged(verifier, TASK, ""))
    assert (verdict.status, verdict.score) == ("error", None)
    assert "broken: broken raised ValueError: no" in verdict.reason
    assert verdict.scores == {"ok": 1.0}


def test_parts_are_judged_at_the_same_time_on_a_pool():
    waiting, most = 0, 0

    class Waits(Verifier):
        async def verify(self, task, completion):
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            await asyncio.sleep(0.05)
            waiting -= 1
            return Verdict.from_score(1)

    with VerifierPool(workers=1) as pool:
        verifier = CombineVerifier([Waits(), Waits(), Waits()])
        assert asyncio.run(pool.verify(verifier, TASK, "")).score == 1.0
    assert most == 3


def test_the_pool_runs_parts_that_need_a_process_in_one():
    parts = {"pid": InProcess(), "exact": {"name": "exact"}}
    with VerifierPool(workers=1) as pool:
        verdict = asyncio.run(pool.verify(CombineVerifier(parts, "any"), Task("1", "?", answer="x"), "pid"))
        killed = asyncio.run(pool.verify(CombineVerifier([InProcess(time_limit=0.5)]), TASK, "hang"))
    assert verdict.answer is not None and verdict.answer != str(os.getpid())
    assert (killed.status, killed.score) == ("timeout", 0.0)


class Longest(Verifier):
    """Pays the longest completion of a group, and remembers the groups."""

    def __init__(self):
        self.groups = []

    def verify(self, task, completion):
        return self.verify_group(task, [completion])[0]

    def verify_group(self, task, completions):
        self.groups.append(list(completions))
        return [float(len(text) == max(map(len, completions))) for text in completions]


def group_verdicts(verifier, completions, pooled):
    if not pooled:
        return asyncio.run(judged_group(verifier, TASK, completions))
    with VerifierPool() as pool:
        return asyncio.run(pool.verify_group(verifier, TASK, completions))


@pytest.mark.parametrize("pooled", [True, False])
def test_a_part_that_compares_is_given_the_whole_group(pooled):
    rule = Says(0.5)
    longest = Longest()
    parts = {"rule": {"name": rule, "weight": 1}, "rank": {"name": longest, "weight": 2}}
    verifier = CombineVerifier(parts)
    verdicts = group_verdicts(verifier, ["a", "ccc", "bb"], pooled)
    assert longest.groups == [["a", "ccc", "bb"]] and rule.asked == 3
    assert [verdict.score for verdict in verdicts] == [0.5, 2.5, 0.5]
    assert verdicts[1].scores == {"rule": 0.5, "rank": 1.0}


@pytest.mark.parametrize("pooled", [True, False])
def test_behind_a_gate_those_are_compared_that_passed_it(pooled):
    longest = Longest()
    verifier = CombineVerifier([{"name": "regex", "pattern": "[ab]+"}, longest], "gated")
    verdicts = group_verdicts(verifier, ["a", "ccc", "bb"], pooled)
    assert longest.groups == [["a", "bb"]]
    assert [verdict.score for verdict in verdicts] == [0, 0, 1]
    assert [verdict.score for verdict in group_verdicts(verifier, ["c", "cc"], pooled)] == [0, 0]
    assert longest.groups == [["a", "bb"]]  # nothing to compare


def test_only_tasks_whose_part_compares_wait_for_their_group():
    verifier = CombineVerifier({"sums": Longest(), "words": Says(1.0)}, "routed")
    with VerifierPool() as pool:
        verification = Verification(verifier, pool)
        assert verification.by_group(TASK)
        assert not verification.by_group(Task("2", "?", source="words"))


def test_a_combination_without_a_comparing_part_judges_no_group():
    assert CombineVerifier([Says(1.0)]).verify_group is None
