"""SimpleRL-Zoo: correctness alone is paid, whatever form a base model writes (Zeng et al. 2025, arXiv 2503.18892)."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import (
    BEFORE,
    ENGINE,
    MOVED,
    Response,
    clipped_gradient,
    entropy_gradient,
    k3_gradient,
    of_the_group,
    policy_gradient,
    softmax,
)

from rlvr.records import Task

TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
# (text, right): continuations of a plain prompt by a base model, with a box or without, with tags or without.
RESPONSES = [
    ("We add: 2 + 2 = 4. So the final answer is \\boxed{4}.", True),
    ("\\boxed{4}", True),
    ("2 + 2 is 4. The answer is 4.", True),
    ("First 2, then 2 more. Therefore, the answer is: 4", True),
    ("<think> 2 + 2 = 4 </think> <answer> \\boxed{4} </answer>", True),
    ("</answer> Step 1: add. The answer is \\boxed{4}. </answer>", True),
    ("Let me check: 5? No. " + "so " * 200 + "\\boxed{4}", True),
    ("The answer is 5.", False),
    ("<think> 2 + 2 = 5 </think> <answer> \\boxed{5} </answer>", False),
    ("I do not know. " + "so " * 200, False),
    ("", False),
]


def less_entropy(log_odds):
    """The gradient of -0.001 H of two tokens: d H / d log-odds = -log-odds p (1 - p)."""
    p = softmax([0.0, log_odds])[1]
    slope = 0.001 * log_odds * p * (1 - p)
    return np.asarray([-slope, slope])


@pytest.fixture
def step(recipe_step):
    return recipe_step("simplerl-zoo", [TASK])


def test_ten_responses(step):
    got = step.rewards([text for text, _ in RESPONSES])
    assert got == [float(right) for _, right in RESPONSES]


def test_no_form_is_worth_anything(step):
    """Around one and the same answer, right or wrong, every form has the same reward: 1 or 0, and nothing between."""
    forms = ("{}", "<think>so</think> <answer>{}</answer>", "<answer>{}", "Answer:\n{}\n", "## Step 1: {}\n## Step 2:")
    for answer, reward in (("\\boxed{4}", 1.0), ("\\boxed{5}", 0.0)):
        assert set(step.rewards([form.format(answer) for form in forms])) == {reward}


@pytest.mark.parametrize("text", ["2 + 2 = 4", "4", "So we get $4$.", "Two and two make 4, as we wanted."])
def test_a_right_number_without_a_marker_is_right(step, text):
    """The authors take the last number (hkust-nlp/simpleRL-reason@cf1c785 verl/utils/reward_score/
    qwen_math_eval_toolkit/parser.py, extract_answer): a base model need not learn a marker."""
    assert step.rewards([text]) == [1.0]


def test_gradient_of_a_two_token_policy(step):
    """GRPO by tokens, as verl has it, the KL of weight 1e-4 with the estimator k3 (low_var_kl of
    train_grpo_math_tune_ray.sh), and the entropy bonus of 0.001."""
    ids = [(1, 0, 0), (1,), (0,), (0, 1)]
    texts = [RESPONSES[i][0] for i in (0, 2, 7, 9)]
    batch = step.score([[Response(text, own) for text, own in zip(texts, ids, strict=True)]])
    logits, reference = [0.0, 2.0], [0.0, -2.0]
    got = step.gradient(batch, logits, reference=reference)
    reward = policy_gradient(of_the_group([1, 1, 0, 0], 1e-6, unbiased=True), ids, logits, "tokens")
    kl = 1e-4 * k3_gradient(ids, logits, reference, "tokens")
    assert np.abs(kl).max() > 1e-5
    np.testing.assert_allclose(got, reward + kl + less_entropy(2.0), rtol=1e-9)


@pytest.mark.parametrize("moved", [False, True])
def test_gradient_of_a_step(step, moved):
    """By the ratio to the policy before the first update, clipped at 0.2 on both sides and by no dual clip
    (verl/trainer/ppo/core_algos.py, compute_policy_loss); nothing of the engine's log-probs."""
    ids = [(0, 1, 2, 3), (1,), (0, 1, 2, 3), (2, 1, 2)]
    batch = step.score([[Response(RESPONSES[i][0], own) for i, own in zip((0, 2, 7, 9), ids, strict=True)]])
    got = step.gradient(batch, MOVED, old=BEFORE if moved else None, reference=ENGINE, engine=ENGINE)
    advantages = of_the_group([1, 1, 0, 0], 1e-6, unbiased=True)
    policy = clipped_gradient(advantages, ids, MOVED, BEFORE if moved else MOVED, "tokens")
    rest = 1e-4 * k3_gradient(ids, MOVED, ENGINE, "tokens") - 0.001 * entropy_gradient(MOVED)
    np.testing.assert_allclose(got, policy + rest, rtol=1e-9)


def test_hard_tasks_alone_teach_nothing(recipe_step):
    """The paper matches the difficulty to the model: a task that is never or always solved has no reward's gradient,
    and the entropy bonus is left."""
    step = recipe_step("simplerl-zoo", [TASK, Task(id="u", prompt="What is 1 + 3?", answer="4")])
    right, wrong = Response(RESPONSES[0][0], (1,)), Response(RESPONSES[7][0], (0,))
    batch = step.score([[right] * 4, [wrong] * 4])
    got = step.gradient(batch, [0.0, 1.0], reference=[0.0, 1.0])
    np.testing.assert_allclose(got, less_entropy(1.0), rtol=1e-9)
