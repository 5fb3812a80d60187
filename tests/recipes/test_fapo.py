"""FAPO: a right response with a flaw is worth 0, between another right one and a wrong one.

The rewards are those of github verl-project/verl-recipe, commit 48ea0a7, fapo/reward_fn_reasoning.py
(`compute_score_fapo`), with the overlong buffer of fapo/run_fapo_7b.sh.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group

from rlvr.records import Task
from rlvr.testing import StubJudge

TASK = Task(id="t", prompt="What is 1+1?", answer="2")
GOOD = "1 and 1 are \\boxed{2}."
FLAWED = "I guess that it is \\boxed{2}."
WRONG = "I guess that it is \\boxed{3}."


def judge():
    return StubJudge(lambda request: request.verdict("yes" if "guess" in request.fenced["response"] else "no"))


def test_rewards_and_who_is_judged(recipe_step):
    with judge() as stub:
        step = recipe_step("fapo", [TASK], judge=stub.url)
        assert step.rewards([GOOD, FLAWED, WRONG, "no answer"]) == [1.0, 0.0, -1.0, -1.0]
        # Right ones alone are shown to the judge.
        assert [request.fenced["response"] for request in stub.requests] == [GOOD, FLAWED]


def test_a_long_response_costs_up_to_one(recipe_step):
    with judge() as stub:
        step = recipe_step("fapo", [TASK], judge=stub.url)
        lengths = (4096, 6144, 8192)
        batch = step.score([[Response(GOOD, (1,) * length) for length in lengths]])
    expected = [1 + min(0.0, (4096 - length) / 4096) for length in lengths]
    np.testing.assert_allclose(batch.column("reward"), expected, atol=1e-12)


@pytest.mark.parametrize(("others", "sign"), [([WRONG] * 7, 1), ([GOOD] * 7, -1), ([WRONG] * 5 + [GOOD] * 2, 1)])
def test_a_flawed_answer_is_a_help_while_few_are_right(recipe_step, others, sign):
    with judge() as stub:
        step = recipe_step("fapo", [TASK], judge=stub.url)
        batch = step.score([[Response(text) for text in [FLAWED, *others]]])
    worth = {GOOD: 1.0, FLAWED: 0.0, WRONG: -1.0}
    expected = of_the_group([worth[text] for text in [FLAWED, *others]], 1e-6, unbiased=True)
    np.testing.assert_allclose(batch.column("advantage"), expected, atol=1e-9)
    assert np.sign(batch.column("advantage")[0]) == sign
