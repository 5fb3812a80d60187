"""Scores of the tiny stand-ins for reward models, by transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer


def chat_score(folder: Path, prompt: str, reply: str) -> float:
    """The logit of a sequence classifier on a chat of two messages."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


def step_scores(folder: Path, prompt: str, steps: Sequence[str], separator: str) -> np.ndarray:
    """The probability of the second label at the last token of the separator after each step, in a chat."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    before = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False) + "<|assistant|>"
    scores = []
    for number in range(1, len(steps) + 1):
        text = before + "".join(step + separator for step in steps[:number])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            # A decoder: what follows changes nothing before it.
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(float(logits.softmax(-1)[1]))
    return np.asarray(scores)
