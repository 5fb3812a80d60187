"""CAPO: the tokens of steps that a judge calls wrong are penalised beside the reward of the answer."""

from __future__ import annotations

import json

import numpy as np
from hand_written_steps import Response, of_the_group

from rlvr.records import Task
from rlvr.testing import StubJudge

TASK = Task(id="t", prompt="1+1=", answer="2")
FLAWED = "We add.\n\nThis is bad.\n\nSo \\boxed{2}"
CLEAN = "We add.\n\nSo \\boxed{2}"
WRONG = "This is bad.\n\nSo \\boxed{3}"


def critic(strict):
    """A judge that calls steps with `bad` wrong in each of its votes, and other steps in the first `strict` of them."""
    seen = {}

    def answer(request):
        steps = [text for name, text in sorted(request.fenced.items()) if name.startswith("step_")]
        key = "\n".join(steps)
        seen[key] = seen.get(key, 0) + 1
        harsh = seen[key] <= strict
        labels = {str(n): "wrong" if "bad" in text or harsh else "right" for n, text in enumerate(steps, start=1)}
        return json.dumps({"steps": labels, "code": request.code})

    return StubJudge(answer)


def test_wrong_steps_alone_are_penalised(recipe_step):
    with critic(strict=1) as stub:
        step = recipe_step("capo", [TASK], judge=stub.url)
        texts = [FLAWED, CLEAN, WRONG]
        batch = step.score([[Response(text, (1,) * len(text)) for text in texts]])
    # Four votes on each; one of them against all steps does not count.
    assert len(stub.requests) == 12
    outcomes = of_the_group([1.0, 1.0, 0.0])
    for text, outcome, got in zip(texts, outcomes, batch.tokens("advantage"), strict=True):
        expected = np.full(len(text), outcome)
        at = text.find("This is bad.")
        if at >= 0:
            expected[at : at + len("This is bad.")] -= 0.5
        np.testing.assert_allclose(got[1:], expected, atol=1e-9)
    # The answer weighs more: the flawed step of a right response stays above the wrong response.
    assert batch.tokens("advantage")[0][1:].min() > batch.tokens("advantage")[2][1:].max()
    assert batch.column("reward").tolist() == [1.0, 1.0, 0.0]


def test_a_vote_that_is_split_counts_against_the_step(recipe_step):
    """Of two as frequent labels the lower one counts."""
    with critic(strict=2) as stub:
        step = recipe_step("capo", [TASK], judge=stub.url)
        batch = step.score([[Response(text, (1,) * len(text)) for text in (CLEAN, WRONG)]])
    good = of_the_group([1.0, 0.0])[0]
    np.testing.assert_allclose(batch.tokens("advantage")[0][1:8], good - 0.5, atol=1e-9)
