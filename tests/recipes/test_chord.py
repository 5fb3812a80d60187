"""CHORD-phi: the recipe's whole loss on a policy of two tokens, with one demonstration beside the sampled tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_written_steps import (
    Response,
    clipped_gradient,
    moved_policy,
    of_the_group,
    probing_group,
    score_function,
    softmax,
)

from rlvr.config.stage_plan import stage_plans
from rlvr.losses.tokens import Denominators, TokenBatch
from rlvr.recipes.papers import find_paper
from rlvr.records import Task
from rlvr.stages.grpo.build_objective import build_objective

MU = 0.1
"""mu_peak and mu_valley of chord-phi in examples/mix_chord/mix_chord.yaml"""


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def tokens_of(logprobs, advantages):
    old = logprobs.detach()
    return TokenBatch(
        sequence=torch.arange(len(advantages)),
        sequences=len(advantages),
        weight=torch.ones(len(advantages), dtype=torch.float64),
        advantage=torch.tensor(advantages, dtype=torch.float64),
        proximal_logprobs=old,
        behaviour_logprobs=old,
        statistics={("logprobs", "current"): logprobs},
    )


def gradient_of_the_recipe(theta, advantages):
    """Two sampled tokens, A and B, and the demonstration A, where log pi(A) = log sigmoid(theta)."""
    (plan,) = stage_plans(find_paper("chord").config)
    policy, shown = build_objective(plan, shares_weights=True).components
    parameter = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    sampled = tokens_of(torch.nn.functional.logsigmoid(signs * parameter), advantages)
    demonstration = tokens_of(torch.nn.functional.logsigmoid(parameter)[None], [0.0])
    loss = policy.coef * policy.loss(sampled, Denominators(2.0, 2.0, 1.0)).value
    loss = loss + shown.coef * shown.loss(demonstration, Denominators(1.0, 1.0, 1.0)).value
    (gradient,) = torch.autograd.grad(loss, parameter)
    return float(gradient)


@pytest.mark.parametrize("theta", [-6.0, -1.0, 0.0, 0.7, 5.0])
@pytest.mark.parametrize("advantages", [(1.0, -1.0), (0.0, 0.0), (-0.5, 2.0)])
def test_gradient_of_a_two_token_policy(theta, advantages):
    """d log pi(A) = 1 - p and d log pi(B) = -p; phi = p (1 - p) is a constant in the gradient."""
    p = sigmoid(theta)
    policy = -(advantages[0] * (1 - p) - advantages[1] * p) / 2
    shown = -p * (1 - p) * (1 - p)
    expected = (1 - MU) * policy + MU * shown
    assert gradient_of_the_recipe(theta, list(advantages)) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_sure_and_hopeless_tokens_of_a_demonstration_hardly_count():
    """Imitation alone would pull hardest at p near 0; phi has its largest pull, of p (1 - p)^2, at p = 1/3."""
    hopeless, third, sure = (gradient_of_the_recipe(theta, [0.0, 0.0]) for theta in (-7.0, math.log(0.5), 7.0))
    assert third == pytest.approx(-MU * 4 / 27)
    assert abs(hopeless) < 0.01 * abs(third)
    assert abs(sure) < 0.01 * abs(third)


TASK = Task(id="t", prompt="What is 2 + 2?", answer="4", demonstration="abba")
OTHER = Task(id="u", prompt="What is 1 + 3?", answer="4", demonstration="a")
SHOWN = [6, 7, 7, 6, 1, 6, 1]
"""Both demonstrations in the lent tokenizer's ids, with their ends."""
THOUGHT = "<think>2 + 2</think>"
# (text, reward): 1 for the answer, 0.1 for one pair of <think> tags, whatever stands around it.
RESPONSES = [
    (f"{THOUGHT} \\boxed{{4}}", 1.1),
    (f"{THOUGHT} so\n\\boxed{{4}}.", 1.1),
    ("\\boxed{4}", 1.0),
    (f"{THOUGHT}{THOUGHT} \\boxed{{4}}", 1.0),
    ("2 + 2</think> \\boxed{4}", 1.0),
    (f"{THOUGHT} \\boxed{{5}}", 0.1),
    (f"{THOUGHT} I do not know", 0.1),
    ("\\boxed{5}", 0.0),
    ("<think>2 + 2 \\boxed{5}", 0.0),
    ("", 0.0),
    (f"Well. {THOUGHT} \\boxed{{4}}", 1.1),
    ("<think></think>\\boxed{4}", 1.1),
    (f"{THOUGHT}", 0.1),
    ("</think> 4 <think>", 0.0),
]


def test_rewards_of_responses(recipe_step):
    """format_score_coef 0.1 of MathBoxedRewardFn (modelscope/Trinity-RFT, trinity/common/rewards/math_reward.py)."""
    got = recipe_step("chord", [TASK]).rewards([text for text, _ in RESPONSES])
    assert got == pytest.approx([reward for _, reward in RESPONSES])


def test_gradient_of_the_recipe_s_own_batch(recipe_step):
    """0.9 of the clipped loss (0.2 on both sides, at most 3 times a negative advantage, the mean over tokens, the
    deviation with n - 1 and 1e-6) and 0.1 of the mean over the demonstration's tokens, each weighed by p (1 - p). The
    engine's log-probs have no weight."""
    logits, old = moved_policy(12)
    step = recipe_step("chord", [TASK, OTHER])
    right, wrong = RESPONSES[0][0], RESPONSES[7][0]
    group = [*probing_group(right, wrong), Response(wrong, (1, 2, 3))]
    same = [Response(wrong, (1,))] * 2
    batch = step.score([group, same])
    ids = [response.ids for response in (*group, *same)]
    advantages = [*of_the_group([1.1 if response.text == right else 0.0 for response in group], 1e-6, True), 0.0, 0.0]
    policy = clipped_gradient(advantages, ids, logits, old, "tokens", cap=3.0)
    p = softmax(logits)
    shown = -sum(p[token] * (1 - p[token]) * score_function([token], logits) for token in SHOWN) / len(SHOWN)
    got = step.gradient(batch, logits, old=old)
    np.testing.assert_allclose(got, (1 - MU) * policy + MU * shown, rtol=1e-9, atol=1e-12)
    engine = np.linspace(1, 0, 12).tolist()
    at_once = step.gradient(batch, logits, engine=engine)
    np.testing.assert_allclose(at_once, step.gradient(batch, logits), rtol=1e-9, atol=1e-12)
