"""Recipes whose reward is a rubric: infimed-orbit and rubicon.

The points and the penalty on length of infimed-orbit are those of github pidneuralode/ORBIT, commit 8f106a1:
src/orbit/rubrics_rl/scoring.py, `normalize_score`, and src/orbit/rubrics_rl/managers/baseline.py.
"""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, plan_of

from rlvr.records import Task
from rlvr.testing import StubJudge


def met_where_said(request):
    """A criterion is met where its last word stands in the response."""
    criteria = re.findall(r"^(\d+)\. (.*)$", request.fenced["criteria"], re.MULTILINE)
    met = {number: text.split()[-1] in request.fenced["response"] for number, text in criteria}
    return json.dumps({"met": met, "code": request.code})


def points(rubric, text, limit=None, tokens=0):
    """What is met of a rubric over the sum of its positive points, less the authors' penalty on length."""
    total = sum(max(value, 0) for _, value in rubric)
    score = sum(value for word, value in rubric if word in text) / total
    return score if limit is None else score + min(0.0, -(tokens - (limit - 4096)) / 4096)


# infimed-orbit

RUBRIC = [("fever", 5.0), ("rest", 3.0), ("antibiotics", -4.0)]
CASE = Task(
    id="c",
    prompt=[{"role": "user", "content": "I cough at night."}],
    info={"rubrics": [{"criterion": f"The reply has {word}", "points": value} for word, value in RUBRIC]},
)
REPLIES = [
    ("Have you a fever?", 5 / 8),
    ("Have you a fever? Take a rest.", 1.0),
    ("Take antibiotics.", -0.5),
    ("A fever needs rest and antibiotics.", 0.5),
    ("I see.", 0.0),
]
"""Replies and their scores: a mistake costs, also below 0."""


def test_points_of_what_is_met_over_the_positive_points(recipe_step):
    with StubJudge(met_where_said) as stub:
        step = recipe_step("infimed-orbit", [CASE], judge=stub.url)
        batch = step.score([[Response(text) for text, _ in REPLIES]])
        assert len(stub.requests) == len(REPLIES)
    expected = [score for _, score in REPLIES]
    assert expected == [points(RUBRIC, text) for text, _ in REPLIES]
    np.testing.assert_allclose(batch.column("reward"), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(batch.column("advantage"), of_the_group(expected, 1e-6, unbiased=True), rtol=1e-9)


@pytest.mark.parametrize("tokens", [4096, 6144, 8192])
def test_the_last_4096_tokens_cost_up_to_1(recipe_step, tokens):
    with StubJudge(met_where_said) as stub:
        step = recipe_step("infimed-orbit", [CASE], judge=stub.url)
        batch = step.score([[Response("A fever?", (1,) * tokens), Response("I see.", (1,))]])
    got, short = batch.column("reward")
    assert (got, short) == (pytest.approx(points(RUBRIC, "A fever?", 8192, tokens)), 0.0)


def test_a_judge_that_leaves_a_criterion_out_pays_and_costs_nothing(recipe_step):
    def silent(request):
        return met_where_said(request) if "rest" in request.fenced["response"] else '{"met": {"1": true}}'

    with StubJudge(silent) as stub:
        step = recipe_step("infimed-orbit", [CASE], judge=stub.url)
        reward = step.score([[Response(text) for text, _ in REPLIES]]).column("reward")
    assert [math.isnan(value) for value in reward] == [True, False, True, False, True]


def test_the_numbers_are_those_of_the_authors_files():
    """configs/training.json."""
    config = plan_of("infimed-orbit").config
    loss = config.algorithm.loss.options
    assert (loss["clip_low"], loss["clip_high"], loss["average"]) == (0.2, 0.28, "tokens")
    assert (config.rollout.top_p, config.rollout.dynamic_sampling.attempts) == (0.95, 10)
    assert config.optim.updates_per_batch == 1
    assert config.algorithm.kl is None


# rubicon

ANCHORED = Task(
    id="a",
    prompt="When did you feel most alive?",
    info={
        "rubric": [
            {"text": "It tells of the ridge", "weight": 3.0},
            {"text": "It has the dawn", "weight": 1.0},
            {"text": "It is no person's answer, but a model", "weight": -1.0, "veto": True},
        ]
    },
)


def with_hacks(request):
    """As above; the criteria of all tasks are met where the response praises the question or itself."""
    reply = json.loads(met_where_said(request))
    reply["met"] |= {
        "1": "Great question" in request.fenced["response"],
        "2": "I did well" in request.fenced["response"],
    }
    return json.dumps(reply)


def test_a_veto_takes_all_and_the_score_saturates(recipe_step):
    """tanh(2 x share): the second half of the points is worth a quarter of the first one."""
    with StubJudge(with_hacks) as stub:
        step = recipe_step("rubicon", [ANCHORED], "open-ended", judge=stub.url)
        got = step.rewards(
            [
                "On a ridge at dawn.",
                "On a ridge.",
                "At dawn.",
                "Great question! On a ridge at dawn.",
                "On a ridge at dawn. I did well.",
                "I am a model. On a ridge at dawn.",
                "No.",
            ]
        )
    expected = [math.tanh(2 * share) for share in (1, 0.75, 0.25, 0, 0, 0, 0)]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    assert math.tanh(2) - math.tanh(1) < math.tanh(1) / 3


def test_prompts_in_the_middle_band_train(recipe_step):
    tasks = [
        ANCHORED,
        Task(id="b", prompt="And least?", info=ANCHORED.info),
        Task(id="c", prompt="?", info=ANCHORED.info),
    ]
    groups = [["On a ridge at dawn."] * 2, ["On a ridge.", "No."], ["No."] * 2]
    with StubJudge(with_hacks) as stub:
        step = recipe_step("rubicon", tasks, "open-ended", judge=stub.url)
        batch = step.score([[Response(text) for text in texts] for texts in groups])
    assert {rollout.task.id for rollout in batch.rollouts} == {"b"}


def test_constraints_come_first():
    first, second = plan_of("rubicon", "constraints"), plan_of("rubicon", "open-ended")
    assert (first.before, second.before) == (0, first.steps)
    assert first.config.verifier.name == "instructions"
