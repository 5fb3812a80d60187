"""LASER-D: the update at its shipped numbers, and the prompt; its rewards and targets are held by test_laser_d.py.

The numbers are those of github hkust-nlp/Laser, commit c9e7c4e: scripts/training/laser-d-1.5b/laser-d-1.5b-l4096.sh,
verl/trainer/ppo/core_algos.py, scripts/data_preprocess/deepscaler.py, verl/workers/fsdp_workers.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, k3_gradient, of_the_group, plan_of, score_function, softmax

from rlvr.data import Template
from rlvr.records import Task

TASK = Task(id="t", prompt="What is 1 + 1?", answer="2")
RIGHT, WRONG, NO_BOX = "so </think> \\boxed{2}", "so </think> \\boxed{3}", "so it is 2"
OLD = np.log([0.2, 0.2, 0.2, 0.2, 0.05, 0.15])
NEAR = np.log([0.252, 0.238, 0.162, 0.158, 0.05, 0.14])
"""Ratios of 1.26, 1.19, 0.81, 0.79 and 1."""
FAR = np.log([0.258, 0.12, 0.1, 0.122, 0.30, 0.10])
"""A ratio of 1.29, and one of 6, which nothing caps in a wrong response."""
REFERENCE = np.log([0.1, 0.2, 0.3, 0.1, 0.2, 0.1])
ENGINE = np.log([0.3, 0.1, 0.1, 0.3, 0.1, 0.1])
GROUP = [
    (RIGHT, (0, 1, 2, 3), 1.5),
    (WRONG, (0, 1, 2, 3, 4), -0.5),
    (WRONG, (4, 5), -0.5),
    (NO_BOX, (5,), -1.0),
    (RIGHT, (1, 3), 1.5),
    (WRONG, (2, 2), -0.5),
    (NO_BOX, (3, 0), -1.0),
    (WRONG, (0, 3), -0.5),
]
"""Texts, tokens and rewards of a group of eight: nothing is known of its class yet, so that each length has the bonus
of a half."""


def entropy_gradient(logits):
    """d H / d logits = -p (log p + H)."""
    p = softmax(logits)
    return -p * (np.log(p) - (p * np.log(p)).sum())


def expected(logits):
    """max(-A r, -A clip(r, 0.8, 1.28)), a mean over all tokens, plus 0.001 of the KL, less 0.001 of the entropy."""
    responses = [ids for _, ids, _ in GROUP]
    advantages = of_the_group([reward for _, _, reward in GROUP], 1e-6, unbiased=True)
    ratio = softmax(logits) / softmax(OLD)
    result = np.zeros(len(logits))
    for advantage, ids in zip(advantages, responses, strict=True):
        for token in ids:
            beyond = ratio[token] > 1.28 if advantage > 0 else ratio[token] < 0.8
            if not beyond:
                result -= advantage * ratio[token] * score_function([token], logits)
    result /= sum(map(len, responses))
    return result + 0.001 * k3_gradient(responses, logits, REFERENCE, "tokens") - 0.001 * entropy_gradient(logits)


@pytest.mark.parametrize("logits", [NEAR, FAR], ids=["near", "far"])
def test_gradient_of_a_later_update(recipe_step, logits):
    step = recipe_step("laser-002-343", [TASK])
    batch = step.score([[Response(text, ids) for text, ids, _ in GROUP]])
    assert batch.column("reward").tolist() == [reward for _, _, reward in GROUP]
    # The engine's log-probs do not matter: the ratio is to the trainer's policy before the batch's first update.
    got = step.gradient(batch, logits.tolist(), old=OLD.tolist(), reference=REFERENCE.tolist(), engine=ENGINE.tolist())
    np.testing.assert_allclose(got, expected(logits), rtol=1e-9, atol=1e-12)


def test_the_prompt_is_the_authors():
    template = Template.parse(plan_of("laser-002-343").config.data.template)
    asks = "Let's think step by step and output the final answer within \\boxed{}."
    assert template.user.replace("{prompt}", "What is 1 + 1?") == f"What is 1 + 1? {asks}"
    assert template.system is None


def test_the_numbers_are_those_of_the_authors_script():
    config = plan_of("laser-002-343").config
    rollout, optim = config.rollout, config.optim
    assert (rollout.prompts_per_step, rollout.group_size, rollout.temperature) == (128, 8, 0.6)
    assert (config.data.max_prompt_tokens, rollout.max_new_tokens) == (1024, 16384)
    # ppo_mini_batch_size 64
    assert (optim.updates_per_batch, optim.epochs_per_batch) == (128 // 64, 1)
    assert (optim.lr, optim.schedule, optim.warmup_steps) == (1e-6, "constant", 0)
    assert optim.optimizer.options == {"weight_decay": 0.01}
