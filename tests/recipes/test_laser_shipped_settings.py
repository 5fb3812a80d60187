"""LaSeR as it ships: the score of the token after a response, its share of the advantages, and its loss.

The numbers are those of github RUCBM/LaSeR, commit 48996f7: verl/examples/grpo_trainer/run_qwen2_5_7b.sh,
verl/verl/trainer/ppo/ray_trainer.py (from `add_self_rewarding_loss` on) and verl/verl/workers/actor/dp_actor.py
(`add self reward loss`).
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hand_written_steps import (
    Response,
    clipped_gradient,
    moved_policy,
    of_the_group,
    open_step,
    plan_of,
    policy_gradient,
    probing_group,
    softmax,
)

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.policy import load_policy
from rlvr.records import Task
from rlvr.stages.grpo import scoring

CONSTANT, BETA = -23.0, 0.1
"""ref_model_log_ratio_constant and self_reward_kl_coef"""
COEF, SHARE, LEAST = 0.1, 0.1, 0.1
"""self_reward_loss_coef, self_rewarding_advantages_integration_coef and ..._filtering_threshold"""
REASONING, SELF_REWARDING = 200, 200
"""Steps of the two warm-ups; the first step is number 1 there and 0 here."""
TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"


@pytest.fixture(scope="module")
def policy():
    """It lends the tokenizer, which has the special token."""
    sizes = {"hidden_size": 8, "heads": 1, "kv_heads": 1, "layers": 1, "intermediate_size": 8}
    scratch = ScratchConfig(**sizes, words=["<|vision_start|>"], alphabet="abcdef")
    return load_policy(ModelConfig(scratch=scratch, device="cpu"), 0)


@pytest.fixture
def step(policy, monkeypatch):
    """The log-prob of the special token is minus the last token's id."""

    def logprobs(policy, asked, config):
        vision = policy.tokenizer.encode("<|vision_start|>", add_special_tokens=False)
        assert all(target == vision for _, target in asked)
        return [np.asarray([-float(context[-1])]) for context, _ in asked]

    monkeypatch.setattr(scoring, "continuation_logprobs", logprobs)

    def opened(*tasks):
        return open_step(policy, plan_of("laser"), tasks or [TASK])

    return opened


# (text, minus the log-prob of the token, right)
TEN = [
    (RIGHT, 13, True),
    (RIGHT, 30, True),
    ("so it is \\boxed{4}.", 3, True),
    ("The answer is 4.", 18, True),
    (WRONG, 13, False),
    (WRONG, 22, False),
    ("The answer is 5.", 3, False),
    ("", 20, False),
    ("\\boxed{}", 16, False),
    ("I do not know", 23, False),
]


def group_of(members):
    return [Response(text, (1, last)) for text, last, _ in members]


def score_of(last):
    return min(1.0, max(0.0, BETA * (-last - CONSTANT)))


def test_the_score_pays_nothing(step):
    batch = step().score([group_of(TEN)], step=500)
    assert batch.column("reward").tolist() == [float(right) for _, _, right in TEN]
    np.testing.assert_allclose(batch.column("reward/last_token"), [BETA * (23.0 - last) for _, last, _ in TEN])


def blended(members):
    """(1 - share) A + share x the standardised score; A alone where the scores hardly differ."""
    verdicts = of_the_group([float(right) for _, _, right in members], 1e-6, unbiased=True)
    scores = [score_of(last) for _, last, _ in members]
    spread = statistics.stdev(scores)
    if spread <= LEAST:
        return verdicts
    mean = statistics.fmean(scores)
    return [(1 - SHARE) * a + SHARE * (s - mean) / spread for a, s in zip(verdicts, scores, strict=True)]


NARROW = [(RIGHT, 13, True), (WRONG, 15, False), *[(RIGHT, 13, True)] * 4]
"""Scores of 1, 0.8 and four times 1: a deviation of 0.08."""
WIDE = [(RIGHT, 13, True), (WRONG, 14, False), (WRONG, 15, False), (RIGHT, 14, True), (WRONG, 16, False)]
"""A deviation of 0.11."""
OUTSIDE = [(RIGHT, 3, True), (WRONG, 13, False), (WRONG, 1, False)]
"""All scores are 1 when they are clipped."""
EQUAL = [(RIGHT, 13, True), (RIGHT, 23, True)]
"""Both right: the verdict tells nothing, and the score does."""


def test_advantages_after_both_warm_ups(step):
    groups = [TEN, NARROW, WIDE, OUTSIDE, EQUAL]
    assert 0.8 * LEAST < statistics.stdev([score_of(last) for _, last, _ in NARROW]) < LEAST
    assert LEAST < statistics.stdev([score_of(last) for _, last, _ in WIDE]) < 1.2 * LEAST
    tasks = [Task(id=f"t{i}", prompt="?", answer="4") for i in range(len(groups))]
    batch = step(*tasks).score([group_of(members) for members in groups], step=REASONING + SELF_REWARDING)
    expected = [value for members in groups for value in blended(members)]
    np.testing.assert_allclose(batch.column("advantage"), expected, rtol=1e-9, atol=1e-12)
    # Equal verdicts: a tenth of +-1 / sqrt(2).
    np.testing.assert_allclose(batch.column("advantage")[-2:], [0.1 / 2**0.5, -0.1 / 2**0.5])


def test_advantages_are_of_the_verdict_alone_before(step):
    batch = step().score([group_of(TEN)], step=REASONING + SELF_REWARDING - 1)
    expected = of_the_group([float(right) for _, _, right in TEN], 1e-6, unbiased=True)
    np.testing.assert_allclose(batch.column("advantage"), expected, rtol=1e-9)


def loss_of_the_score(members, logits, vision):
    """d / d logits of the mean of w (beta (log pi(z) - constant) - verdict)^2, w = n / (2 n_class)."""
    rights = [float(right) for _, _, right in members]
    score = BETA * (np.log(softmax(logits)[vision]) - CONSTANT)
    slope = 0.0
    for right in rights:
        weight = len(rights) / (2 * rights.count(right))
        slope += weight * 2 * (score - right) * BETA / len(rights)
    toward = -softmax(logits)
    toward[vision] += 1
    return slope * toward


MEMBERS = [(RIGHT, 3, True), (WRONG, 2, False), (WRONG, 4, False), (WRONG, 3, False)]


@pytest.mark.parametrize(("number", "coef"), [(REASONING - 1, 0.0), (REASONING, COEF)])
def test_gradient_of_both_losses(step, policy, number, coef):
    (vision,) = policy.tokenizer.encode("<|vision_start|>", add_special_tokens=False)
    logits = np.random.default_rng(0).normal(size=len(policy.tokenizer)).tolist()
    opened = step()
    batch = opened.score([group_of(MEMBERS)], step=number)
    ids = [(1, last) for _, last, _ in MEMBERS]
    advantages = of_the_group([float(right) for _, _, right in MEMBERS], 1e-6, unbiased=True)
    expected = policy_gradient(advantages, ids, logits, "tokens")
    expected += coef * loss_of_the_score(MEMBERS, logits, vision)
    np.testing.assert_allclose(opened.gradient(batch, logits, step=number), expected, rtol=1e-6, atol=1e-9)


def test_a_response_that_was_cut_off_is_not_scored(step, policy):
    """Without a difference of verdicts there is the loss of the score alone, and it is of the one that ended."""
    logits = np.random.default_rng(0).normal(size=len(policy.tokenizer)).tolist()
    opened = step()
    cut = Response(RIGHT, (1, 3), truncated=True)
    batch = opened.score([[Response(RIGHT, (1, 3)), cut]], step=REASONING)
    (vision,) = policy.tokenizer.encode("<|vision_start|>", add_special_tokens=False)
    # With one class alone its weight is 1.
    score = BETA * (np.log(softmax(logits)[vision]) - CONSTANT)
    toward = -softmax(logits)
    toward[vision] += 1
    expected = COEF * 2 * (score - 1) * BETA * toward
    np.testing.assert_allclose(opened.gradient(batch, logits, step=REASONING), expected, rtol=1e-6, atol=1e-9)


def test_clip_of_the_policy_loss(step, policy):
    """0.2 on both sides, at most 3 times a negative advantage (actor.yaml: clip_ratio 0.2, clip_ratio_c 3.0), the mean
    over tokens; the engine's own log-probs do not matter."""
    logits, old = moved_policy(len(policy.tokenizer))
    opened = step()
    group = [*probing_group(RIGHT, WRONG), Response(WRONG, (1, 2, 3))]
    batch = opened.score([group])
    rewards = [float(response.text == RIGHT) for response in group]
    ids = [response.ids for response in group]
    expected = clipped_gradient(of_the_group(rewards, 1e-6, True), ids, logits, old, "tokens", cap=3.0)
    np.testing.assert_allclose(opened.gradient(batch, logits, old=old), expected, rtol=1e-9, atol=1e-12)
    engine = np.linspace(0, 1, len(logits)).tolist()
    at_once = opened.gradient(batch, logits, engine=engine)
    np.testing.assert_allclose(at_once, opened.gradient(batch, logits), rtol=1e-9, atol=1e-12)
