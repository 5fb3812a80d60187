"""Clip and Delta: step rewards that a further step cannot raise. The formulas are from notes of the paper (Gao et al.
2024, arXiv 2410.15115), whose text could not be read."""

from __future__ import annotations

import numpy as np
from hand_written_steps import Response, of_the_group
from scores_by_hand import step_scores

from rlvr.records import Task

TASK = Task(id="t", prompt="1+1=", answer="2")
SHORT = ["First we add.", "So \\boxed{2}"]
REPEATED = ["First we add.", "First we add.", "First we add.", "First we add.", "So \\boxed{2}"]
WRONG = ["Hm.", "So \\boxed{3}"]


def written(steps):
    text = "\n\n".join(steps)
    return Response(text, (1,) * len(text))


def test_credit_of_each_step(recipe_step, tmp_path):
    """min(score - 0.5, 0), then less the next one's, summed from the step on: the step's own clipped score."""
    step = recipe_step("clip-delta", [TASK], models=tmp_path)
    cases = [SHORT, REPEATED, WRONG]
    batch = step.score([[written(steps) for steps in cases]])
    outcomes = of_the_group([1.0, 1.0, 0.0])
    for steps, outcome, got in zip(cases, outcomes, batch.tokens("advantage"), strict=True):
        scores = step_scores(tmp_path / "prm", TASK.prompt, steps, "<extra_0>")
        begin = 1
        for number, (text, score) in enumerate(zip(steps, scores, strict=True)):
            # Telescoped: what follows a step adds nothing to it.
            expected = outcome + min(score - 0.5, 0.0)
            np.testing.assert_allclose(got[begin : begin + len(text)], expected, atol=1e-4)
            begin += len(text) + (2 if number < len(steps) - 1 else 0)
        # No step pays above the outcome.
        assert (got[1:] <= outcome + 1e-9).all()
    assert batch.column("reward").tolist() == [1.0, 1.0, 0.0]
