"""rubric: weights, vetoes, votes for each criterion, and what is no verdict."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from rlvr.errors import ConfigError, DataError
from rlvr.records import Task
from rlvr.testing import StubJudge
from rlvr.verifiers import VerifierPool, as_verifier
from rlvr.verifiers.pool import Verification

CRITERIA = [
    {"name": "right", "text": "It says 4.", "weight": 3},
    "It is brief.",
    {"criterion": "It is rude.", "points": -2, "name": "rude"},
    {"title": "safe", "description": "It harms nobody.", "veto": True, "weight": 0},
]
TASK = Task("1", "2 + 2?", info={"rubric": CRITERIA})
WEIGHTS = (3, 1, -2, 0)


def says(*met):
    numbered = {str(number): value for number, value in enumerate(met, start=1)}
    return lambda request: json.dumps({"code": request.code, "met": numbered})


def rubric(stub, **options):
    return as_verifier({"name": "rubric", "urls": stub.url, "model": "m", "hedge": None, **options})


def verdict(stub, task=TASK, **options):
    return asyncio.run(rubric(stub, **options).verify(task, "4"))


def test_every_combination_is_paid_its_points():
    """By hand: points of what is met over the 4 positive points, 0 where the veto strikes."""
    with StubJudge() as stub:
        for met in itertools.product((True, False), repeat=4):
            stub.answer = says(*met)
            given = verdict(stub)
            points = sum(weight for weight, one in zip(WEIGHTS, met, strict=True) if one) / 4
            assert given.score == (points if met[3] else 0.0)
            names = ("right", "2", "rude", "safe")
            assert given.scores == {name: float(one) for name, one in zip(names, met, strict=True)}
        assert stub.requests[0].fenced["criteria"].splitlines() == [
            "1. It says 4.",
            "2. It is brief.",
            "3. It is rude.",
            "4. It harms nobody.",
        ]
        stub.answer = says(True, True, False, False)
        assert verdict(stub, veto_score=-1.0).score == -1


def test_a_veto_on_what_is_undesirable_strikes_where_it_is_met():
    task = Task("1", "?", info={"rubric": ["good", {"text": "rude", "weight": -1, "veto": True}]})
    with StubJudge(says(True, False)) as stub:
        assert verdict(stub, task).score == 1
        stub.answer = says(True, True)
        assert verdict(stub, task, veto_score=-3).score == -3


@pytest.mark.parametrize(
    "reply",
    [
        says(True, True, False),
        says(True, True, False, True, True),
        says(True, "yes", False, True),
        lambda request: json.dumps({"met": {str(n): True for n in range(1, 5)}}),
        lambda request: says(True, True, True, True)(request) + says(True, True, True, False)(request),
        lambda request: "all of them are met",
    ],
)
def test_a_reply_without_one_verdict_on_each_is_undecided(reply):
    with StubJudge(reply) as stub:
        verifier = rubric(stub)
        given = asyncio.run(verifier.verify(TASK, "4"))
        assert given.score is None and given.reason.startswith("unparsable")
        assert verifier.metrics()["undecided/unparsable"] == 1


def test_votes_are_counted_for_each_criterion():
    replies = iter([says(True, True, False, True), says(True, False, False, True), says(False, False, False, True)])
    with StubJudge(lambda request: next(replies)(request)) as stub:
        assert verdict(stub, votes=3, concurrency=1).scores == {"right": 1, "2": 0, "rude": 0, "safe": 1}


def test_criteria_of_all_tasks_come_first():
    with StubJudge(says(True, False)) as stub:
        options = {"criteria": [{"text": "polite", "weight": 3}]}
        assert verdict(stub, Task("1", "?", info={"rubric": ["brief"]}), **options).score == 0.75
        stub.answer = says(True)
        assert verdict(stub, Task("1", "?"), **options).score == 1


def test_what_is_refused_before_training():
    good = {"name": "rubric", "urls": "http://127.0.0.1:1/v1", "model": "m"}
    with VerifierPool() as pool:
        for written, message in (
            (None, "a rubric is a list"),
            ([], "a rubric is a list"),
            ("brief", "a rubric is a list"),
            ([{"weight": 1}], "criterion 1 has no `text`"),
            ([{"text": "a", "weight": "much"}], "'much', not a finite number"),
            ([{"text": "a", "weight": -1}], "no criterion has a weight above 0"),
            ([{"text": "a", "name": "x"}, {"text": "b", "name": "x"}], "one name"),
        ):
            task = Task("1", "?", info={} if written is None else {"rubric": written})
            with pytest.raises(DataError, match=message):
                Verification(good, pool).check([task])
        # A veto of all tasks is enough beside a task's own criteria, and not alone.
        vetoes = {**good, "criteria": [{"text": "rude", "weight": -1, "veto": True}]}
        Verification(vetoes, pool).check([Task("1", "?", info={"rubric": ["brief"]})])
        with pytest.raises(DataError, match="no criterion has a weight above 0"):
            Verification(vetoes, pool).check([Task("1", "?")])
    with pytest.raises(ConfigError, match=r"no \{criteria\}"):
        as_verifier({**good, "template": "{response}"})
    with pytest.raises(ConfigError, match="criterion 1 has no `text`"):
        as_verifier({**good, "criteria": [{"weight": 2}]})


def test_a_part_of_the_verdict_is_a_reward(make_trainer):
    with StubJudge(lambda request: says(len(request.fenced["response"]) % 2 == 0, True)(request)) as stub:
        written = {
            "name": "rubric",
            "urls": stub.url,
            "model": "m",
            "criteria": [{"text": "even", "name": "even"}, "b"],
        }
        reward = {"name": "verdict", "verifier": "style", "part": "even"}
        trainer = make_trainer({"verifier": "exact", "verifiers": {"style": written}, "rewards": [reward]})
        trainer.train(1)
    expected = [float(len(rollout.text) % 2 == 0) for rollout in trainer.batch.rollouts]
    assert trainer.batch.columns["reward"].tolist() == expected


def writing(request, criteria=None):
    """Writes two criteria where there is no response to judge; else the first one alone is met."""
    if "response" not in request.fenced:
        written = criteria or [
            {"text": "It is right.", "weight": 3},
            {"text": "It is rude.", "weight": -1, "veto": True},
        ]
        return json.dumps({"code": request.code, "criteria": written})
    count = len(request.fenced["criteria"].splitlines())
    return json.dumps({"code": request.code, "met": {str(n): n == count - 1 for n in range(1, count + 1)}})


def test_the_judge_writes_the_criteria_once_for_a_task():
    tasks = [
        Task("1", "What is 2 + 2?"),
        Task("2", "And 3?", info={"rubric": [{"text": "three", "weight": 2}, "kind"]}),
    ]
    with StubJudge(writing, delay=0.02) as stub:
        written = {
            "name": "rubric",
            "urls": stub.url,
            "model": "m",
            "write_criteria": True,
            "criteria": ["It is short."],
        }
        verifier = as_verifier(written)
        assert all(verifier.check_task(task) is None for task in tasks)

        async def gather():
            return await asyncio.gather(*(verifier.verify(task, text) for task in tasks for text in "abc"))

        verdicts = asyncio.run(gather())
        asyncio.run(verifier.verify(tasks[0], "d"))
        requests = [request for request in stub.requests if "response" not in request.fenced]
        assert len(requests) == 1 and requests[0].fenced == {"prompt": "What is 2 + 2?"}
        shown = {request.fenced["criteria"] for request in stub.requests if "response" in request.fenced}
    assert shown == {"1. It is short.\n2. It is right.\n3. It is rude.", "1. It is short.\n2. three\n3. kind"}
    # Of the points 1 + 3 the judge's own 3 are met; of 1 + 2 + 1 the 2. That a veto is written counts for nothing.
    assert [one.score for one in verdicts] == [0.75] * 3 + [0.5] * 3
    assert "has no rubric" not in verdicts[0].reason


@pytest.mark.parametrize(
    ("criteria", "said"),
    [
        ([{"text": "It is rude.", "weight": -1}], "no criterion has a weight above 0"),
        ([{"weight": 1}], "criterion 1 has no `text`"),
        (["It is right."], "no objects"),
        ("right", "no objects"),
        ([{"text": "a", "weight": "much"}], "not a finite number"),
    ],
)
def test_criteria_that_are_no_rubric_leave_the_verdict_undecided(criteria, said):
    with StubJudge(lambda request: writing(request, criteria)) as stub:
        verifier = as_verifier({"name": "rubric", "urls": stub.url, "model": "m", "write_criteria": True})
        verdict = asyncio.run(verifier.verify(Task("1", "?"), "a"))
        assert verdict.score is None and said in verdict.reason
        assert verifier.metrics()["undecided/unparsable"] == 1
        stub.answer = writing
        assert asyncio.run(verifier.verify(Task("1", "?"), "a")).score == 1.0  # asked anew


def test_a_template_for_criteria_that_names_a_missing_field_is_refused():
    written = {"name": "rubric", "urls": "http://127.0.0.1:9/v1", "model": "m", "write_criteria": True}
    verifier = as_verifier({**written, "criteria_template": "{prompt} {topic}"})
    assert "the task's info has no 'topic'" in verifier.check_task(Task("1", "?"))
