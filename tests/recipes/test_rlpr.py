"""RLPR: 0.9 of the gain in the reference answer's mean probability over the base model's without reasoning, where it is
a gain, plus 0.1 for the form, less 1 for repetition; and the filter by the spread (Yu et al. 2025, arXiv 2506.18254).

The oracles are written from OpenBMB/RLPR at commit 8490fca.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest
from hand_written_steps import plan_of

from rlvr import registry
from rlvr.components import Continuation, RewardTerm
from rlvr.core.component import called_as
from rlvr.planner.plan import keeps_reference
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch
from rlvr.rewards import build_terms, score, walk

FORMED = "<think> a </think> <answer> b </answer>"
LOOP = " ".join("abcdefghij" * 10)
SHORT_LOOP = " ".join("abcdefghij" * 9)


def reward(make_rollout, text, after, before):
    """The recipe's reward of a response whose answer has these probabilities after the reasoning and without it."""
    batch = Batch([make_rollout([9, 1, 2], prompt=1, text=text)])
    scored = [(Continuation(-1, [9], [3, 4], model="reference"), np.log(before))]
    # Only a response with a place for the answer is asked for.
    if "<answer>" in text:
        scored.append((Continuation(0, [9, 1], [3, 4]), np.log(after)))

    def given(term):
        if not term.function.asks_continuations:
            return term
        function = functools.partial(term.function, scored=scored)
        return dataclasses.replace(term, function=called_as(RewardTerm, function))

    terms = [term.each(given) for term in build_terms(find_paper("rlpr").config.rewards)]
    return float(score(batch, terms).column("reward")[0])


def of_their_code(text, after, before):
    """prob.py, format_reward and __call__; ray_trainer.py, valid_flag; repetition.py, all with the script's numbers."""
    tags = {tag: text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")}
    placed = re.search("(?s)<think>.*</think>.*<answer>", text) is not None
    valid = placed and tags["<think>"] == tags["</think>"] == tags["<answer>"] == 1
    with_reasoning = sum(after) / len(after) if valid else 0.0
    gain = with_reasoning - sum(before) / len(before)
    formed = set(tags.values()) == {1} and re.fullmatch("(?s)<think>.*</think>.*<answer>.*</answer>.*", text)
    value = 0.9 * (gain if gain >= 0 else 0.0) + 0.1 * bool(formed)
    words = text.split()
    windows = [tuple(words[i : i + 10]) for i in range(len(words) - 9)]
    if value != 0 and any(windows.count(window) >= 10 for window in set(windows)):
        value -= 1
    return value


@pytest.mark.parametrize(
    ("text", "after", "before", "expected"),
    [
        (FORMED, [0.9, 0.7], [0.2, 0.4], 0.9 * 0.5 + 0.1),
        (FORMED, [0.1, 0.3], [0.2, 0.4], 0.1),
        # One certain token and one that is impossible: a mean of probabilities, which a product would make 0.
        (FORMED, [1.0, 1e-9], [0.25, 0.25], 0.9 * 0.25 + 0.1),
        ("<think> a </think> so <answer> b </answer> done", [0.9, 0.7], [0.2, 0.4], 0.9 * 0.5 + 0.1),
        # The answer is not closed: its likelihood counts, the form does not.
        ("<think> a </think> <answer> b", [0.9, 0.7], [0.2, 0.4], 0.9 * 0.5),
        # Without thinking, and with a second answer, there is no place to put the reference answer.
        ("a <answer> b </answer>", [0.9, 0.7], [0.2, 0.4], 0.0),
        ("<think> a </think> <answer> b </answer> <answer> c </answer>", [0.9, 0.7], [0.2, 0.4], 0.0),
        (f"<think> {LOOP} </think> <answer> b </answer>", [0.9, 0.7], [0.2, 0.4], 0.9 * 0.5 + 0.1 - 1),
        (f"<think> {SHORT_LOOP} </think> <answer> b </answer>", [0.9, 0.7], [0.2, 0.4], 0.9 * 0.5 + 0.1),
        # A loop without an answer has 0, which their code does not punish.
        (f"<think> {LOOP}", [0.9, 0.7], [0.2, 0.4], 0.0),
    ],
)
def test_the_reward(make_rollout, text, after, before, expected):
    assert reward(make_rollout, text, after, before) == pytest.approx(expected, abs=1e-6)
    assert of_their_code(text, after, before) == pytest.approx(expected, abs=1e-6)


def test_the_base_model_gives_what_is_subtracted():
    """The reference is kept, and planned for; its context is the prompt alone, with a blank before the answer."""
    plan = plan_of("rlpr")
    terms = list(walk(build_terms(plan.config.rewards)))
    (likelihood,) = [term.function for term in terms if term.name == "answer_likelihood"]
    assert keeps_reference(plan)
    assert (likelihood.baseline, likelihood.bare, likelihood.text) == ("reference", "", " {answer}")


def test_dropped_groups_are_replaced():
    """`while len(buffer_batch) < batch_size * n_samples`; tests/stages/grpo/test_redraw.py writes the loop anew."""
    rollout = plan_of("rlpr").config.rollout
    assert (rollout.dynamic_sampling.by, rollout.prompts_per_step) == ("selection", 768)


def test_the_filter(make_rollout):
    """Steps 1 to 10 drop nothing, 6 to 10 give the average, from 11 on it moves by a hundredth and groups below half of
    it are dropped (ray_trainer.py, `fit`)."""
    config = plan_of("rlpr").config
    (spec,) = config.algorithm.select
    selector = registry.build("selector", spec)
    rng = np.random.default_rng(0)
    history = []
    bound = average = None
    dropped = 0
    for step in range(1, 16):
        width = rng.uniform(0.0, 1.0, 12)
        rewards = width[:, None] * rng.uniform(size=(12, 8))
        deviations = rewards.std(axis=1, ddof=1)
        if step == 11:
            average = np.mean(history)
        elif step > 11:
            average = 0.99 * average + 0.01 * history[-1]
        if step >= 11:
            bound = 0.5 * average
        if step >= 6:
            history.append(deviations.mean())
        expected = np.ones(12, dtype=bool) if bound is None else deviations >= bound
        dropped += int((~expected).sum())
        batch = Batch([make_rollout([1], prompt=1, group=f"g{g}", member=m) for g in range(12) for m in range(8)])
        batch.columns["reward"] = rewards.ravel()
        selector.sampled(batch)
        kept = sorted({int(position) // 8 for position in selector(batch)})
        assert kept == np.flatnonzero(expected).tolist(), step
        selector.observe({})
    assert dropped > 0
