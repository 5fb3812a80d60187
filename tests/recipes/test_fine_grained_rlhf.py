"""Fine-grained RLHF: rewards of three models at three densities, and what follows a token is its credit.

The numbers are those of github allenai/FineGrainedRLHF, commit a1469d4, tasks/qa_feedback/training/reward.py and
fine_grained_config.yml.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_written_steps import Response
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from rlvr import registry
from rlvr.data import History
from rlvr.records import Segment, Task

TASK = Task(id="t", prompt="question: which river? context: it is long", info={"question": "which river?"})
TEXT = "The Danube, it is long. It ends in a sea; so I read."
PARTS = ["The Danube,", "it is long.", "It ends in a sea;", "so I read."]
SENTENCES = ["The Danube, it is long.", "It ends in a sea; so I read."]
MEAN, STD = -0.44677690555995353, 8.301160619054132


def labels_at_markers(folder, question, parts, pair):
    """True for each part at whose marker the second of two outputs is the greatest of the two, as in reward.py."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    found = []
    for number in range(1, len(parts) + 1):
        shown = "".join(f"{part} </s> " for part in parts[:number]).rstrip()
        ids = tokenizer(f"{question} answer: {shown}")["input_ids"]
        with torch.no_grad():
            found.append(torch.argmax(model(torch.tensor([ids])).logits[0, -1][pair]).item() == 1)
    return found


def completeness(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        score = float(model(**tokenizer(f"{TASK.prompt} answer: {TEXT}", return_tensors="pt")).logits[0, 0])
    return (score - MEAN) / STD * 0.3


def test_the_reward_to_go_of_three_densities(recipe_step, tmp_path):
    step = recipe_step("fine-grained-rlhf", [TASK], models=tmp_path)
    rollout = step._rollout(TASK, "g0", 0, Response(TEXT, (1,) * len(TEXT)))
    rollout.segments.append(Segment("turn", 1, len(rollout)))
    batch = step.stage.scoring.score([rollout], step.stage.context.policy, History(), (0, step.stage.steps))
    (got,) = registry.build("advantage", step.plan.config.algorithm.advantage)(batch)
    # The reward at each character, at the end of what it is for.
    rewards = np.zeros(len(TEXT))
    question = "question: which river?"  # without the passages
    for parts, name, shown, pair, worth in (
        (PARTS, "relevance", question, [1, 2], 0.3),
        (SENTENCES, "facts", TASK.prompt, [0, 2], 0.5),
    ):
        for part, good in zip(parts, labels_at_markers(tmp_path / name, shown, parts, pair), strict=True):
            rewards[TEXT.find(part) + len(part) - 1] += worth if good else -worth
    rewards[-1] += completeness(tmp_path / "completeness")
    to_go = np.cumsum(rewards[::-1])[::-1]
    # A space between two parts leads to the next one, as in the authors' returns.
    np.testing.assert_allclose(got[1:], to_go, atol=1e-4)
    assert batch.column("reward")[0] == pytest.approx(completeness(tmp_path / "completeness"), abs=1e-5)
