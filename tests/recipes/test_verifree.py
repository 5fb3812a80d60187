"""VeriFree: both terms of the gradient, and the reward of each kind of response."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_written_steps import PROMPT, Response, open_step, plan_of, score_function

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.data import Template
from rlvr.policy import load_policy
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

ANSWER = "12"
PUT = "> \\boxed{12} </answer>"
"""What the authors put after the reasoning (verifree.py, `step`): their template trims the spaces within the box."""
TASK = Task(id="t", prompt="How many?", answer=ANSWER)
LONG = 40
"""Tokens of a response, at most, in the step that is opened here."""


@pytest.fixture(scope="module")
def policy():
    """A tiny policy whose tokenizer has a few words; it computes the rewards."""
    words = ["<answer", "> \\boxed{", "} </answer>", "reason"]
    sizes = {"hidden_size": 16, "heads": 1, "kv_heads": 1, "layers": 1, "intermediate_size": 16, "context": 96}
    scratch = ScratchConfig(**sizes, words=words, alphabet="123 ", init_std=0.5)
    return load_policy(ModelConfig(scratch=scratch, device="cpu"), 3)


@pytest.fixture
def step(policy):
    plan = plan_of("verifree")
    rollout = plan.config.rollout.model_copy(update={"max_new_tokens": LONG})
    config = plan.config.model_copy(update={"rollout": rollout})
    return open_step(policy, plan.model_copy(update={"config": config}), [TASK])


def ids_of(policy, text):
    return tuple(policy.tokenizer.encode(text, add_special_tokens=False))


def response(policy, text, truncated=False):
    return Response(text, ids_of(policy, text), truncated)


def reward_of(policy, reasoning):
    """The product of the probabilities of the answer's tokens, by a forward pass of the model."""
    before = [PROMPT, *ids_of(policy, reasoning)]
    after = ids_of(policy, PUT)
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*before, *after]])).logits[0].double()
    logprobs = logits.log_softmax(-1)[torch.arange(len(before) - 1, len(before) + len(after) - 1), list(after)]
    return float(logprobs.sum().exp())


GROUP = [
    # (reasoning, with the opening; the policy's own answer)
    ("reason 1<answer", "> \\boxed{12} </answer>"),
    ("reason 2 2<answer", "> \\boxed{3} </answer>"),
    ("3<answer", "> \\boxed{12} </answer>"),
]


def test_rewards_are_probabilities_of_the_reference_answer_whatever_the_policy_answered(step, policy):
    texts = [reasoning + own for reasoning, own in GROUP]
    batch = step.score([[response(policy, text) for text in texts]])
    expected = [reward_of(policy, reasoning) for reasoning, _ in GROUP]
    np.testing.assert_allclose(batch.column("reward"), expected, rtol=1e-4)
    assert len(set(expected)) == 3
    other = step.score([[response(policy, reasoning + "> \\boxed{1} </answer>") for reasoning, _ in GROUP]])
    np.testing.assert_array_equal(other.column("reward"), batch.column("reward"))


def test_responses_without_an_answer_and_those_that_were_cut_are_worth_nothing(step, policy):
    long = "1" * 36 + "<answer"
    assert len(ids_of(policy, long)) <= LONG < len(ids_of(policy, long + PUT))
    texts = [("reason 1 12", False), (GROUP[0][0] + "> \\boxed{", True), (long, False), (GROUP[0][0] + PUT, False)]
    batch = step.score([[response(policy, text, truncated) for text, truncated in texts]])
    np.testing.assert_allclose(batch.column("reward"), [0, 0, 0, reward_of(policy, GROUP[0][0])], rtol=1e-4)


def expected_gradient(rewards, reasonings, policy, logits):
    """- mean over responses of A grad log pi(reasoning) + R grad log pi(answer), A = R - mean of the others' R."""
    result = np.zeros(len(logits))
    for number, (reward, (reasoning, answered)) in enumerate(zip(rewards, reasonings, strict=True)):
        advantage = reward - np.mean([other for i, other in enumerate(rewards) if i != number])
        result -= advantage * score_function(ids_of(policy, reasoning), logits) / len(rewards)
        if answered:
            result -= reward * score_function(ids_of(policy, PUT), logits) / len(rewards)
    return result


def test_the_gradient_has_both_terms(step, policy):
    logits = np.random.default_rng(4).normal(size=len(policy.tokenizer))
    texts = [*(reasoning + own for reasoning, own in GROUP), "reason 1 12"]
    batch = step.score([[response(policy, text) for text in texts]])
    reasonings = [*((reasoning, True) for reasoning, _ in GROUP), ("reason 1 12", False)]
    rewards = [*(reward_of(policy, reasoning) for reasoning, _ in GROUP), 0.0]
    expected = expected_gradient(rewards, reasonings, policy, logits)
    gradient = step.gradient(batch, logits)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    # The second term is no small part of it.
    first = expected_gradient(rewards, [(reasoning, False) for reasoning, _ in reasonings], policy, logits)
    assert np.linalg.norm(expected - first) > 0.1 * np.linalg.norm(first)


def test_a_group_of_equal_rewards_learns_the_answer_alone(step, policy):
    logits = np.random.default_rng(5).normal(size=len(policy.tokenizer))
    reasoning, _ = GROUP[0]
    batch = step.score([[response(policy, reasoning + own) for own in ("> \\boxed{1", "> \\boxed{2", PUT)]])
    expected = -reward_of(policy, reasoning) * score_function(ids_of(policy, PUT), logits)
    np.testing.assert_allclose(step.gradient(batch, logits), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_the_prompt_is_the_authors():
    """verifree.py, apply_ours_qwen3_template: the user's turn."""
    template = Template.parse(find_paper("verifree").config.data.template)
    asks = "Please reason step by step, and put your final answer within <answer> \\boxed{} </answer>."
    assert template.user.replace("{prompt}", "Q?") == f"Q?\n{asks}"
    assert template.system is None


def test_the_numbers_are_those_of_the_authors_script():
    config = find_paper("verifree").config
    assert config.data.max_prompt_tokens == 1024
    # oat's Adam (sail-sg/oat, oat/args.py)
    assert config.optim.optimizer.options == {"betas": [0.9, 0.95]}
    assert config.rollout.prompts_per_step * config.rollout.group_size == 128
    assert (config.rollout.max_new_tokens, config.rollout.stop, config.rollout.temperature) == (
        3000,
        ["</answer>"],
        1.0,
    )
    assert (config.optim.lr, config.optim.updates_per_batch, config.optim.schedule) == (1e-6, 1, "constant")
    assert config.algorithm.kl is None and config.algorithm.entropy == 0 and config.algorithm.correction is None
