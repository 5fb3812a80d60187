"""Cross-domain RLVR: the reward is the probability that a judge gives to its positive verdict."""

from __future__ import annotations

import pytest

from rlvr.records import Task
from rlvr.testing import StubJudge

TASK = Task(id="t", prompt="Which drug lowers blood sugar?", answer="Insulin")
PROBABILITIES = {"It is insulin.": (0.9, 0.05), "A hormone of the pancreas.": (0.3, 0.6), "Aspirin.": (0.0, 0.99)}


def soft(request):
    yes, no = PROBABILITIES[request.fenced["response"]]
    return request.probabilities({"YES": yes, "NO": no})


def test_the_reward_is_soft(recipe_step):
    with StubJudge(soft) as stub:
        step = recipe_step("cross-domain-soft-reward-rlvr", [TASK], judge=stub.url)
        got = step.rewards(list(PROBABILITIES))
    assert got == pytest.approx([yes / (yes + no) for yes, no in PROBABILITIES.values()])
    # Between right and wrong there is a half right answer, of which a hard verdict would be 0.
    assert got[0] > got[1] > got[2] == 0
    for request in stub.requests:
        assert request.fenced["answer"] == "Insulin" and request.body["max_tokens"] == 1
