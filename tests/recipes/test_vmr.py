"""VMR: an open-ended preference becomes a choice of two that can be verified (arXiv 2511.02463, abstract)."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import MOVED, Response, of_the_group, plan_of, policy_gradient

from rlvr.data import load_tasks

CHOSEN, REJECTED = "Tea is an infusion of leaves.", "Tea is a kind of coffee."
ROWS = [
    {
        "id": f"r{n}",
        "prompt": f"What is tea? ({n})",
        "chosen": [{"role": "user", "content": "What is tea?"}, {"role": "assistant", "content": CHOSEN}],
        "rejected": [{"role": "user", "content": "What is tea?"}, {"role": "assistant", "content": REJECTED}],
    }
    for n in range(64)
]
"""In the form of HuggingFaceH4/ultrafeedback_binarized."""


@pytest.fixture(scope="module")
def tasks():
    """The recipe's source on these rows."""
    return load_tasks({**plan_of("vmr").config.data.train, "data": ROWS})


def places(task):
    """Where the preferred response stands in the prompt, A or B, and where the other one does."""
    ((_, text),) = [(m["role"], m["content"]) for m in task.prompt]
    before = text.index(CHOSEN) < text.index(REJECTED)
    return ("A", "B") if before else ("B", "A")


# Judgements with {x} for the letter that they end with and {y} for the other one.
JUDGEMENTS = [
    ("Response {y} is wrong about the leaves.\n\nVerdict: {x}", True),
    ("Both describe tea. {x} is more exact.\nSo **{x}**.", True),
    ("{y} looks right at first.\nWait, it has the plant wrong.\nTherefore Response {x} is better.", True),
    ("<think>{y} might win on style.</think>\n\\boxed{{{x}}}", True),
    ("My verdict is \\boxed{{{x}}}.", True),
    ("Both are good, {x} or {y}.", False),
    ("Not {x}.", False),
    ("I cannot tell which one is better.", False),
    ("The first one is better.", False),
    ("", False),
]


def judgement(number, x, y):
    return JUDGEMENTS[number][0].format(x=x, y=y)


def test_ten_judgements_of_each_order(recipe_step, tasks):
    """1 for a clear choice of the preferred response wherever it stands, and 0 for a choice of the other one, or of
    none."""
    orders = {}
    for task in tasks:
        orders.setdefault(places(task), task)
    assert set(orders) == {("A", "B"), ("B", "A")}
    for (good, bad), task in orders.items():
        step = recipe_step("vmr", [task])
        clear = [float(clear) for _, clear in JUDGEMENTS]
        assert step.rewards([judgement(n, good, bad) for n in range(10)]) == clear
        assert step.rewards([judgement(n, bad, good) for n in range(10)]) == [0.0] * 10


def test_a_fixed_choice_of_a_place_is_right_by_chance(recipe_step, tasks):
    """The order is random, so that "always the first one" gains nothing: of 64 fair draws 16 to 48 are A but once in
    10,000 times."""
    rewards = [recipe_step("vmr", [task]).rewards(["Verdict: A"])[0] for task in tasks]
    assert rewards == [float(places(task)[0] == "A") for task in tasks]
    assert 16 <= sum(rewards) <= 48


def test_gradient_of_a_policy_of_four_tokens(recipe_step, tasks):
    """Of right and wrong choices, by GRPO, each response's tokens by its length."""
    task = tasks[0]
    good, bad = places(task)
    texts = [judgement(0, good, bad), judgement(0, bad, good), judgement(3, bad, good), judgement(7, good, bad)]
    ids = [(0, 1, 2), (1,), (2, 3), (3, 0, 0, 1)]
    step = recipe_step("vmr", [task])
    batch = step.score([[Response(text, own) for text, own in zip(texts, ids, strict=True)]])
    expected = policy_gradient(of_the_group([1.0, 0.0, 0.0, 0.0]), ids, MOVED, "sequences")
    np.testing.assert_allclose(step.gradient(batch, MOVED), expected, rtol=1e-9)
