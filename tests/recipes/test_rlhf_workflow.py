"""RLHF Workflow: the best and the worst of four responses are a pair for DPO with smoothed labels.

The pairs are those of github RLHFlow/Online-RLHF, commit 3a00ed8, dpo_iteration/run_dpo.py (`max_min`), the loss that
of dpo_iteration/dpo.py (`dpo_loss`, sigmoid), with the numbers of run_loop2.sh.
"""

from __future__ import annotations

import math

import numpy as np
from hand_written_steps import Response, plan_of, score_function, softmax
from scores_by_hand import chat_score

from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

TASK = Task(id="t", prompt="Name a river.")
TEXTS = ["The Danube.", "A lake.", "The Rhine, which is in Germany.", "no"]
IDS = [(1, 0), (1,), (0, 0, 1), (0,)]
BETA, SMOOTHING = 0.1, 0.1


def test_gradient_of_the_best_and_the_worst(recipe_step, tmp_path):
    step = recipe_step("rlhf-workflow", [TASK], "first", models=tmp_path)
    batch = step.score([[Response(text, own) for text, own in zip(TEXTS, IDS, strict=True)]])
    scores = [chat_score(tmp_path / "rm", TASK.prompt, text) for text in TEXTS]
    best, worst = int(np.argmax(scores)), int(np.argmin(scores))
    assert {rollout.member for rollout in batch.rollouts} == {best, worst}
    logits, reference = [0.0, 1.3], [0.0, -0.7]
    ratio = np.log(softmax(logits) / softmax(reference))
    margin = sum(ratio[token] for token in IDS[best]) - sum(ratio[token] for token in IDS[worst])
    probability = 1 / (1 + math.exp(-BETA * margin))
    slope = -BETA * ((1 - SMOOTHING) * (1 - probability) - SMOOTHING * probability)
    expected = slope * (score_function(IDS[best], logits) - score_function(IDS[worst], logits))
    np.testing.assert_allclose(step.gradient(batch, logits, reference=reference), expected, rtol=1e-6)


def test_three_iterations_each_on_data_of_its_own():
    plans = stage_plans(find_paper("rlhf-workflow").config)
    sets = [plan.config.data.train["path"] for plan in plans]
    assert sets == [f"RLHFlow/ultrafeedback_iter{number}" for number in (1, 2, 3)]
    optim = plan_of("rlhf-workflow", "second").config.optim
    assert [plan.steps for plan in plans] == [1, 1, 1]
    assert (optim.lr, optim.epochs_per_batch, 20_000 // optim.updates_per_batch) == (5e-7, 2, 128)
