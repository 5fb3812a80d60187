"""AceReason-Nemotron 1.1: the entropy that the temperature is held at, and truncated answers by stage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, policy_gradient, softmax

from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Task

SLUG = "acereason-nemotron-1-1"
LEFT_OUT = ("maths-8k", "maths-16k")
"""Stages that train on no truncated answer."""
TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
RESPONSES = [
    ("<think>\nTwo and two.\n</think>\nThe answer is \\boxed{4}.", 1.0),
    ("<think>\n5? No, 4.\n</think>\n\\boxed{4}", 1.0),
    ("<think>\n\\boxed{5} at first.\n</think>\n$$\\boxed{4}$$", 1.0),
    ("<think>\nso\n</think>\nThe sum is $\\boxed{2^2}$, that is $\\boxed{4.0}$.", 1.0),
    ("<think>\nTwo and two.\n</think>\n\\boxed{5}", 0.0),
    ("<think>\nIt is \\boxed{4}\n</think>\nI am not sure.", 0.0),
    ("<think>\nTwo and two, wait, two", 0.0),
    ("<think>\nso\n</think>\n\\boxed{}", 0.0),
    ("<think>\nso\n</think>\n\\boxed{-4}", 0.0),
    ("", 0.0),
]


def reinforced():
    return [plan for plan in stage_plans(find_paper(SLUG).config) if plan.kind == "grpo"]


def maths():
    return [plan for plan in reinforced() if plan.config.verifier.name == "math"]


def tempered_entropy(logits, temperature):
    p = softmax(np.asarray(logits) / temperature)
    return -math.fsum(float(q * math.log(q)) for q in p)


def test_ten_responses(recipe_step):
    for plan in maths():
        got = recipe_step(SLUG, [TASK], plan.name).rewards([text for text, _ in RESPONSES])
        assert got == [reward for _, reward in RESPONSES]


@pytest.mark.parametrize("confident", [2.6, 3.0, 4.2])
def test_the_temperature_brings_the_tempered_entropy_to_the_papers(recipe_step, confident):
    """A policy of five tokens, one of them likely: from whatever entropy it begins with, the sampled distribution comes
    to 0.3 nats, from above or below the first temperature."""
    logits = [confident, 0.0, 0.0, 0.0, 0.0]
    for plan in reinforced():
        task = TASK if plan.config.verifier.name == "math" else CODE
        stage = recipe_step(SLUG, [task], plan.name).stage
        temperature = stage.rollout_context_at(0).sampling.temperature
        start = tempered_entropy(logits, temperature)
        for number in range(plan.steps):
            stage.observe({"entropy": tempered_entropy(logits, temperature)})
            temperature = stage.rollout_context_at(number + 1).sampling.temperature
        assert tempered_entropy(logits, temperature) == pytest.approx(0.3, abs=0.01)
        assert abs(start - 0.3) > 0.05


CODE = Task(id="c", prompt="double", info={"kind": "function", "name": "f", "cases": [{"args": [2], "expected": 4}]})


def test_a_flat_policy_is_cooled_and_a_sharp_one_is_heated(recipe_step):
    """The sign: entropy above 0.3 lowers the temperature, entropy below raises it."""
    for entropy, sign in ((0.6, -1), (0.1, 1)):
        stage = recipe_step(SLUG, [TASK], "maths-8k").stage
        before = stage.rollout_context_at(0).sampling.temperature
        stage.observe({"entropy": entropy})
        assert sign * (stage.rollout_context_at(1).sampling.temperature - before) > 0


GROUP = [
    Response(RESPONSES[0][0], (1, 0)),
    Response(RESPONSES[4][0], (0,)),
    Response(RESPONSES[6][0], (0, 0, 1, 0), truncated=True),
]


@pytest.mark.parametrize("name", [plan.name for plan in maths()])
def test_gradient_of_a_two_token_policy(recipe_step, name):
    """On-policy GRPO over tokens without a KL. At 8k and 16k tokens a truncated answer teaches nothing, later it is
    wrong like any other; it counts in the group's mean in both."""
    step = recipe_step(SLUG, [TASK], name)
    advantages = of_the_group([1.0, 0.0, 0.0])
    ids = [response.ids for response in GROUP]
    if name in LEFT_OUT:
        advantages, ids = advantages[:2], ids[:2]
    logits = [0.0, 0.4]
    expected = policy_gradient(advantages, ids, logits, "tokens")
    np.testing.assert_allclose(step.gradient(step.score([GROUP]), logits), expected, rtol=1e-9)
    # Strictly on-policy: no weight for what the engine's log-probs are.
    np.testing.assert_allclose(step.gradient(step.score([GROUP]), logits, engine=[0.9, 0.0]), expected, rtol=1e-9)


def test_a_truncated_answer_is_punished_in_the_later_stages_alone(recipe_step):
    """The token 0 stands in truncated answers alone: its logit is pushed down from 24k tokens on."""
    group = [Response(RESPONSES[0][0], (1,)), Response(RESPONSES[4][0], (1,)), Response("hm", (0,) * 9, truncated=True)]
    slopes = []
    for plan in maths():
        step = recipe_step(SLUG, [TASK], plan.name)
        slopes.append(step.gradient(step.score([group]), [0.0, 0.0])[0])
    early, later = slopes[: len(LEFT_OUT)], slopes[len(LEFT_OUT) :]
    # Without the truncated answer the gradient of the token 1 is that of a right and a wrong answer.
    assert max(early) < min(later)
    assert all(slope > 0 for slope in later)


def test_each_update_is_on_policy():
    for plan in reinforced():
        assert plan.config.optim.updates_per_batch * plan.config.optim.epochs_per_batch == 1
        assert plan.config.algorithm.kl is None


def test_the_stages_grow_within_the_model_s_context():
    lengths = [plan.config.rollout.max_new_tokens for plan in maths()]
    assert lengths == sorted(set(lengths))
    context = find_paper(SLUG).config.model.override_config["max_position_embeddings"]
    assert max(plan.config.rollout.max_new_tokens for plan in reinforced()) < context


def test_the_stages_are_the_papers():
    """Mathematics at 8k, 16k and 24k tokens, then code, then mathematics again at 32k (arXiv 2506.13284, figure 2)."""
    stages = [(plan.config.verifier.name, plan.config.rollout.max_new_tokens) for plan in reinforced()]
    assert [size for verifier, size in stages if verifier == "math"] == [8192, 16384, 24576, 32768]
    assert stages[-1] == ("math", 32768)
