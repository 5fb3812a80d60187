"""Recipes whose reward comes from the steps of a response: spark and trm."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group

from rlvr.records import Task
from rlvr.testing import StubJudge


def labels_of(request, label):
    """The reply with `label(text)` for each step."""
    steps = sorted((int(name.rpartition("_")[2]), text) for name, text in request.fenced.items() if "step_" in name)
    return json.dumps({"steps": {str(number): label(text) for number, text in steps}, "code": request.code})


# spark

PROBLEM = Task(id="p", prompt="What is 3 * 4 + 2?")
SOLUTIONS = [
    ("3 * 4 = 12.\n\n12 + 2 = 14.\n\n\\boxed{14}", 1.0),
    ("3 * 4 = 13.\n\n12 + 2 = 14.\n\n\\boxed{14}", 0.0),
    ("3 * 4 = 12.\n\n12 + 2 = 15.\n\n\\boxed{15}", 0.0),
    ("So $\\boxed{\\frac{28}{2}}$.", 1.0),
    ("So \\[\\boxed{\\{\\sqrt{2^{4}}, 14\\}}\\].\n", 1.0),
]
"""Solutions in form and their rewards: one wrong step among right ones is a wrong solution."""
HACKS = [
    "3 * 4 = 12.\n\n\\boxed{12}\n\n12 + 2 = 14.\n\n\\boxed{14}",
    "12 + 2 = 14.\n\n\\boxed{14}\n\nA second problem: 1 + 1 = 2.",
    "12 + 2 = 14.\n\n\\boxed{14}\n\nAnother solved problem: 1 + 1 is in the set {2}.",
    "12 + 2 = 14.\n\n\\boxed{\\frac{28}{2}}\n\nAnother one: x is \\frac{4}{2}}",
    "12 + 2 = 14.\n\n\\boxed{14",
    "12 + 2 = 14.",
    "",
]
"""Two answers, a solved problem after the box (also one that ends in a brace), an open box, none: none is judged."""


def of_the_sums(request):
    return labels_of(request, lambda text: "wrong" if "13" in text or "12 + 2 = 15" in text else "right")


def test_a_solution_is_paid_where_its_form_and_all_its_steps_are_right(recipe_step):
    with StubJudge(of_the_sums) as stub:
        step = recipe_step("spark", [PROBLEM], judge=stub.url)
        batch = step.score([[Response(text) for text in [*(text for text, _ in SOLUTIONS), *HACKS]]])
        assert len(stub.requests) == len(SOLUTIONS)
    expected = [reward for _, reward in SOLUTIONS] + [0.0] * len(HACKS)
    assert batch.column("reward").tolist() == expected
    np.testing.assert_allclose(batch.column("advantage"), of_the_group(expected, 1e-4), rtol=1e-9)


def test_no_answer_of_the_data_is_read(recipe_step):
    """A wrong gold changes nothing: the judge is not shown it."""
    with StubJudge(of_the_sums) as stub:
        # A word: the fences of a request have random digits.
        step = recipe_step("spark", [Task(id="p", prompt=PROBLEM.prompt, answer="ninety-nine")], judge=stub.url)
        assert step.rewards([SOLUTIONS[0][0]]) == [1.0]
        assert stub.requests and all("ninety-nine" not in request.text for request in stub.requests)


# trm

QUESTION = Task(
    id="q", prompt="How long is the Rhine?", info={"documents": ["A post says that the Rhine is 1,320 km long."]}
)
ANSWERS = [
    ("The Rhine is 1,230 km long. It ends in the sea.", 1.0),
    ("The Rhine is 1,320 km long. It ends in the sea.", 0.5),
    ("The Rhine is 1,320 km long.", 0.0),
]
"""Answers and the shares of their sentences that are correct. The documents support the wrong one."""


def critical(request):
    assert "1,320" in request.fenced["documents"]
    return labels_of(request, lambda text: "incorrect" if "1,320" in text else "correct")


def test_the_share_of_correct_sentences_and_half_of_a_bounded_usefulness(recipe_step, tmp_path):
    """What the documents say and is wrong is not paid; the tiny reward model's score is bounded whatever it is."""
    with StubJudge(critical) as stub:
        step = recipe_step("trm", [QUESTION], models=tmp_path, judge=stub.url)
        batch = step.score([[Response(text) for text, _ in ANSWERS]])
    usefulness = [rollout.verdicts["usefulness"].score for rollout in batch.rollouts]
    assert len({round(score, 6) for score in usefulness}) == len(ANSWERS)
    expected = [share + 0.5 / (1 + math.exp(-useful)) for (_, share), useful in zip(ANSWERS, usefulness, strict=True)]
    np.testing.assert_allclose(batch.column("reward"), expected, rtol=1e-6)
    assert [rollout.verdict.score for rollout in batch.rollouts] == pytest.approx([share for _, share in ANSWERS])
