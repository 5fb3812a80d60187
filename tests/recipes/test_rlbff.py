"""RLBFF: a principle stands in the request, and the reward is how sure the judge is that the response satisfies it."""

from __future__ import annotations

import pytest

from rlvr.records import Task
from rlvr.testing import StubJudge

SHORT = "Vienna."
LONG = "The city on the Danube that you mean is Vienna, which has two million people."
# (principle, response) -> probabilities of yes and no
SURE = {("brief", SHORT): (0.9, 0.1), ("brief", LONG): (0.1, 0.6), ("gives context", SHORT): (0.2, 0.7)}
SURE["gives context", LONG] = (0.95, 0.01)


def judge(request):
    yes, no = SURE[request.fenced["principle"], request.fenced["response"]]
    return request.probabilities({"yes": yes, "no": no})


@pytest.mark.parametrize("principle", ["brief", "gives context"])
def test_the_principle_decides(recipe_step, principle):
    task = Task(id="t", prompt="Which city is it?", info={"principle": principle})
    with StubJudge(judge) as stub:
        short, long = recipe_step("rlbff", [task], judge=stub.url).rewards([SHORT, LONG])
    for got, response in ((short, SHORT), (long, LONG)):
        yes, no = SURE[principle, response]
        assert got == pytest.approx((yes - no) / (yes + no))
    assert (short > 0 > long) == (principle == "brief") and (long > 0 > short) == (principle == "gives context")
