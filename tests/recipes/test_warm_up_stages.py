"""Warm Up Before You Train: imitation of a toy domain's reasoning, then many epochs of a hundred target tasks."""

from __future__ import annotations

import collections
import re

import datasets
import numpy as np
import pytest
from hand_written_steps import Response, plan_of, policy_gradient, score_function

from rlvr.config.stage_plan import stage_plans
from rlvr.data import load_tasks
from rlvr.data.sources import limited
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

SLUG = "warm-up-before-you-train"
TASK = Task(id="t", prompt="What is 2 + 2?", answer="It is $\\boxed{4}$.")
# After a prompt that has opened <think>.
RESPONSES = [
    " Two and two. </think> <answer> \\boxed{4} </answer>",
    "Wait, 5? No, 4.\n</think>\n<answer>\n$\\boxed{4}$\n</answer>",
    " so </think><answer>The sum is \\boxed{4.0}</answer>",
    " so </think> <answer> \\boxed{5} </answer>",
    " It is \\boxed{4}. </think> <answer> \\boxed{44} </answer>",
    " so </think> <answer> no answer </answer>",
    " \\boxed{4} </think>",
    " so </think> <answer> \\boxed{4} </answer> so",
    " so </think>",
    "",
]


def tiers(text, gold="4"):
    """The reward of safal312/warmup-before-you-train@c9c4a42 train/dataset_loader.py, load_math; numbers alone are
    compared here."""
    tags = ("</think>", "<answer>", "</answer>")
    found = re.search(r".+</think>\s*<answer>(.+)</answer>\s*$", text, re.DOTALL)
    if any(text.count(tag) != 1 for tag in tags) or found is None:
        return -2.0
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", found[1])
    if not boxes:
        return -1.0
    return 2.0 if boxes[-1] and float(boxes[-1]) == float(gold) else -0.5


@pytest.fixture
def step(recipe_step):
    return recipe_step(SLUG, [TASK])


def test_ten_responses(step):
    got = step.rewards(RESPONSES)
    assert got == [tiers(text) for text in RESPONSES]
    assert set(got) == {2.0, -0.5, -1.0, -2.0}


def test_gradient_of_a_two_token_policy(step):
    """The advantage is the reward minus the group's mean, without a std, over all tokens, so that the distances of
    the four rewards stay."""
    ids = [(1,), (0, 1), (0,), (0, 0, 1)]
    texts = [RESPONSES[i] for i in (0, 3, 5, 8)]
    rewards = [tiers(text) for text in texts]
    assert rewards == [2, -0.5, -1, -2]
    advantages = [reward - sum(rewards) / 4 for reward in rewards]
    batch = step.score([[Response(text, own) for text, own in zip(texts, ids, strict=True)]])
    logits = [0.0, -0.5]
    expected = policy_gradient(advantages, ids, logits, "tokens")
    np.testing.assert_allclose(step.gradient(batch, logits), expected, rtol=1e-9)


def test_a_group_without_a_right_answer_learns_the_form(step):
    """0 and 1 would give this group no gradient."""
    batch = step.score([[Response(RESPONSES[3], (1,)), Response(RESPONSES[9], (0,))]])
    assert step.gradient(batch, [0.0, 0.0])[1] < 0


def test_the_whole_reasoning_on_the_toy_domain_is_imitated(recipe_step):
    """Knights and Knaves: each token of the reasoning and of the answer after it, and the end, weighs the same."""
    assert [plan.kind for plan in stage_plans(find_paper(SLUG).config)] == ["sft", "grpo"]
    puzzle = Task(id="k", prompt="Zoe? Jo?", info={"assignment": {"Zoe": "knight"}}, demonstration="abbbba")
    step = recipe_step(SLUG, [puzzle], "warm-up")
    logits = np.random.default_rng(4).normal(size=8)
    shown = [6, 7, 7, 7, 7, 6, 1]
    expected = -score_function(shown, logits) / len(shown)
    np.testing.assert_allclose(step.gradient(step.demonstrations(), logits), expected, rtol=1e-9)


def test_a_hundred_tasks_of_the_target_and_many_epochs(recipe_step):
    """However many rows the target's data has, reinforcement draws the same hundred, each equally often in 25 epochs;
    the toy domain has no limit."""
    data = plan_of(SLUG).config.data
    rows = [{"id": f"t{n}", "prompt": f"What is {n}?", "answer": str(n)} for n in range(300)]
    tasks = limited(load_tasks(rows), data.limit, data.limit_seed)
    # load_math of train/dataset_loader.py splits the set so, with this seed.
    split = datasets.Dataset.from_list(rows).train_test_split(train_size=100, shuffle=True, seed=42)["train"]
    assert {task.id for task in tasks} == set(split["id"])
    plan = plan_of(SLUG)
    stage = recipe_step(SLUG, tasks).stage
    drawn = collections.Counter(
        draw.task.id for _ in range(plan.steps) for draw in stage.sampler.next(plan.config.rollout.prompts_per_step)
    )
    assert len(drawn) == 100
    assert max(drawn.values()) - min(drawn.values()) <= 1
    assert max(drawn.values()) == 25
    assert plan_of(SLUG, "warm-up").config.data.limit is None
