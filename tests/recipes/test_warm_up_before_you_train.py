"""Warm Up Before You Train: the reward of ten responses after the prompt that opens <think>, and no std."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr import registry
from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task, Verdict
from rlvr.rewards import build_terms, score

RESPONSES = [
    # (text after "<think>\n", reward by train/dataset_loader.py, where 4 is right)
    ("2 and 2</think> <answer>\\boxed{4}</answer>", 2),
    ("2 and 2</think>\n<answer>It is \\boxed{4}.</answer>\n", 2),
    ("2 and 2</think><answer>\\boxed{5}</answer>", -0.5),
    ("2 and 2</think><answer>4</answer>", -1),
    ("\\boxed{4}</think><answer>4</answer>", -1),
    ("2 and 2</think>\\boxed{4}", -2),
    ("2 and 2</think>so<answer>\\boxed{4}</answer>", -2),
    ("2 and 2</think><answer>\\boxed{4}</answer>.", -2),
    ("</think>2</think><answer>\\boxed{4}</answer>", -2),
    ("2 and 2 are \\boxed{4}", -2),
    ("</think><answer>\\boxed{4}</answer>", -2),
]


@pytest.fixture
def paper():
    return find_paper("warm-up-before-you-train")


def test_the_rewards_of_responses(make_rollout, paper):
    verifier = registry.build("verifier", paper.config.verifier)
    rollouts = []
    for member, (text, _) in enumerate(RESPONSES):
        rollout = make_rollout([9, 1], prompt=1, member=member, text=text)
        rollout.verdicts["math"] = verifier.verify(Task("t", "2+2?", "4"), text)
        rollouts.append(rollout)
    batch = Batch(rollouts)
    score(batch, build_terms(paper.config.rewards))
    np.testing.assert_array_equal(batch.column("reward"), [reward for _, reward in RESPONSES])
    # Centred on the group, without its std: the distance between two rewards stays.
    advantage = registry.build("advantage", paper.config.algorithm.advantage)(batch)
    values = [reward for _, reward in RESPONSES]
    np.testing.assert_allclose(advantage, np.asarray(values) - sum(values) / len(values), atol=1e-12)


def test_an_undecided_verdict_counts_only_where_the_value_is_read(make_rollout, paper):
    texts = ["a</think><answer>\\boxed{4}</answer>", "a</think><answer>4</answer>", "a"]
    rollouts = [make_rollout([9, 1], prompt=1, member=i, text=text) for i, text in enumerate(texts)]
    for rollout in rollouts:
        rollout.verdicts["math"] = Verdict.undecided("out of time")
    batch = Batch(rollouts)
    score(batch, build_terms(paper.config.rewards))
    reward = batch.column("reward")
    assert math.isnan(reward[0])
    assert list(reward[1:]) == [-1, -2]


def test_both_stages_have_one_prompt_and_their_own_optimizer(paper):
    warm_up, reinforce = (plan.config for plan in stage_plans(paper.config))
    # The form that the warm-up teaches is the one that the second stage rewards.
    assert warm_up.data.template == reinforce.data.template
    assert warm_up.data.template.endswith("<think>\n")
    assert warm_up.optim.optimizer.options == {"betas": [0.9, 0.95], "weight_decay": 1e-4}
    assert reinforce.optim.optimizer.options == {"betas": [0.9, 0.99], "weight_decay": 0.1}
    assert (warm_up.optim.lr, warm_up.optim.max_grad_norm, warm_up.optim.warmup_steps) == (1e-6, 0.1, 25)
    # trainer_qwen.py samples so, and their log-probs are of the whole distribution (_get_per_token_logps).
    rollout = reinforce.rollout
    # top_k is the default of their copy of TRL (grpo_config.py), which trainer_qwen.py does not set.
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.7, 0.95, 50)
    assert reinforce.algorithm.truncated_sampling and reinforce.algorithm.correction is None
    # 25 epochs of the 100 tasks.
    steps = next(plan.steps for plan in stage_plans(paper.config) if plan.kind == "grpo")
    assert 14 * (steps - 1) < 25 * 100 <= 14 * steps + 14
