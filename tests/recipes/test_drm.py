"""DRM: the answer's reward and three scores of the reasoning."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from hand_written_steps import Response
from scores_by_hand import chat_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlvr.data import History
from rlvr.records import Task

TASK = Task(id="t", prompt="What is 1+1?", answer="2")
REASONED = "1 and 1 are 2, as one finger and one more show."
ASTRAY = "Rivers run to the sea."


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def pair_score(folder, reasoning):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(**tokenizer(TASK.prompt, reasoning, return_tensors="pt")).logits[0, 0])


def test_the_sum_of_four(recipe_step, tmp_path):
    step = recipe_step("drm", [TASK], models=tmp_path)
    cases = [(REASONED, "2", -0.2), (ASTRAY, "2", -1.5), (REASONED, "3", -0.4), (ASTRAY, "3", -2.0)]
    rollouts = []
    for member, (reasoning, answer, logprob) in enumerate(cases):
        text = f"<think>{reasoning}</think>\\boxed{{{answer}}}"
        rollout = step._rollout(TASK, "g0", member, Response(text, (1, 0, 1)))
        logprobs = np.asarray([np.nan, logprob, logprob - 0.1, logprob + 0.1], dtype=np.float32)
        rollouts.append(replace(rollout, behaviour_logprobs=logprobs))
    batch = step.stage.scoring.score(rollouts, step.stage.context.policy, History(), (0, step.stage.steps))
    expected = [
        float(answer == "2")
        + 0.4 * sigmoid(logprob)
        + 0.2 * sigmoid(pair_score(tmp_path / "reranker", reasoning))
        + 0.2 * sigmoid(chat_score(tmp_path / "orm", TASK.prompt, reasoning))
        for reasoning, answer, logprob in cases
    ]
    np.testing.assert_allclose(batch.column("reward"), expected, atol=1e-5)
    # Of two right answers the surer one with its reasoning is not the same; a right one is above each wrong one.
    assert expected[0] != expected[1] and min(expected[:2]) > max(expected[2:])
