"""SimpleDC: the reward is a classifier's probability that a text is a simplified one."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlvr.records import Task

TASK = Task(id="t", prompt="Colorectal carcinoma is frequently asymptomatic.")
TEXTS = ["Bowel cancer often has no signs.", "Colorectal carcinoma is frequently asymptomatic."]


def test_the_reward_is_the_probability_of_the_label(recipe_step, tmp_path):
    step = recipe_step("simpledc", [TASK], models=tmp_path)
    got = step.rewards(TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "classifier")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    place = model.config.label2id["simplified"]
    for text, reward in zip(TEXTS, got, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        # The response alone is read: what it simplifies would be in both texts.
        np.testing.assert_allclose(reward, float(logits.softmax(-1)[place]), atol=1e-5)
    assert all(0 <= reward <= 1 for reward in got) and got[0] != got[1]
