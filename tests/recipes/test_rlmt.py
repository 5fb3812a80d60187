"""RLMT: a reward model scores the reply, and never the thinking before it.

What is scored is that of github princeton-pli/RLMT, commit 2cde311, training/ppo_grpo/verl/workers/fsdp_workers.py
(`SequenceRewardModelWorker._extract_response`, not strict), with the tags of
training/sft_dpo/utils/src/convert_base_to_prompted_model.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, clipped_gradient, entropy_gradient, k3_gradient, of_the_group
from scores_by_hand import chat_score

from rlvr.records import Task

TASK = Task(id="t", prompt="Name a river.")
TEXTS = [
    "<think>A long one.</think>\n<response>\n The Danube. \n</response>",
    "<think>Short.</think> <response>The Danube.</response> and more",
    "The Danube.",
    "<think>I go on and on",
    "<think>Ends early.</think> <response> The Rhine",
    "<response>The Elbe.</response> <response>The Rhine.</response>",
    "The Elbe. </response> The Rhine.",
    "</response> first, then <response>the Elbe.</response>",
]


def reply_of(text):
    """The part of the authors, by their searches."""
    if "<response>" in text:
        text = text[text.find("<response>") + len("<response>") :].lstrip()
    if "</response>" in text:
        text = text[: text.find("</response>")].rstrip()
    return text


def test_the_reply_alone_is_scored(recipe_step, tmp_path):
    step = recipe_step("rlmt", [TASK], models=tmp_path)
    got = step.rewards(TEXTS)
    expected = [chat_score(tmp_path / "rm", TASK.prompt, reply_of(text)) for text in TEXTS]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    # Other thinking, the same reply.
    assert got[0] == pytest.approx(got[1], abs=1e-6) == pytest.approx(got[2], abs=1e-6)
    assert got[0] != pytest.approx(got[3], abs=1e-3)


def test_gradient_of_a_group(recipe_step, tmp_path):
    step = recipe_step("rlmt", [TASK], models=tmp_path)
    ids = [(1, 0), (1,), (0, 0, 1), (0,)]
    texts = [TEXTS[0], TEXTS[4], TEXTS[3], TEXTS[5]]
    batch = step.score([[Response(text, own) for text, own in zip(texts, ids, strict=True)]])
    rewards = [chat_score(tmp_path / "rm", TASK.prompt, reply_of(text)) for text in texts]
    advantages = of_the_group(rewards, 1e-6, unbiased=True)
    np.testing.assert_allclose(batch.column("advantage"), advantages, atol=1e-4)
    logits, reference = [0.0, 1.3], [0.0, -0.7]
    expected = clipped_gradient(advantages, ids, logits, logits, "sequences", clip=(0.2, 0.2))
    expected += 0.001 * k3_gradient(ids, logits, reference) - 0.001 * entropy_gradient(logits)
    np.testing.assert_allclose(step.gradient(batch, logits, reference=reference), expected, atol=1e-5)
