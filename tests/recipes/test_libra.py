"""Libra: a judge of one solution, trained by imitation and then by the verdict's truth."""

from __future__ import annotations

import numpy as np
from hand_written_steps import Response, of_the_group, plan_of

from rlvr.records import Task

SOLVED = Task(id="s", prompt="Problem: 3 * 4? Solution: 12.", answer="correct", demonstration="12 it is.\n\ncorrect")
FAILED = Task(id="f", prompt="Problem: 3 * 5? Solution: 16.", answer="incorrect", demonstration="15.\n\nincorrect")
# (judgement, right for the correct solution, right for the incorrect one)
JUDGEMENTS = [
    ("<think>3 * 4 is 12.</think> correct", 1, 0),
    ("<think>correct? 3 * 5 is 15.</think> incorrect", 0, 1),
    ("<think>I checked each step.</think>\n\nVerdict: **correct**", 1, 0),
    ("<think>correct</think> It may be correct or incorrect.", 0, 0),
    ("<think>correct", 0, 0),
    ("", 0, 0),
]


def test_a_verdict_is_paid_where_it_is_the_label_whatever_the_thinking_says(recipe_step):
    step = recipe_step("libra", [SOLVED, FAILED])
    batch = step.score([[Response(text) for text, _, _ in JUDGEMENTS]] * 2)
    expected = [[float(one) for _, one, _ in JUDGEMENTS], [float(other) for _, _, other in JUDGEMENTS]]
    assert batch.column("reward").tolist() == expected[0] + expected[1]
    advantages = of_the_group(expected[0]) + of_the_group(expected[1])
    np.testing.assert_allclose(batch.column("advantage"), advantages, rtol=1e-9)


def test_judgements_are_imitated_before(recipe_step):
    """The demonstration alone is learned, not the prompt."""
    first, second = plan_of("libra", "sft"), plan_of("libra")
    assert (first.before, second.before) == (0, first.steps)
    batch = recipe_step("libra", [SOLVED], "sft").demonstrations()
    (weights,) = batch.tokens("weight/likelihood")
    assert weights[0] == 0 and weights[1:].all()
