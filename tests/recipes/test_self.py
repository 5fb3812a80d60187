"""SELF: which tasks are learned from, and the forward KL beside them (Nguyen et al. 2025, arXiv 2510.02230)."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, plan_of, policy_gradient, score_function, softmax

from rlvr import registry
from rlvr.data import Draw
from rlvr.records import StopReason, Task
from rlvr.rollout import Completion, Sampling
from rlvr.verifiers.base import as_verifier, judged

RIGHT = Response("so 2 + 2 is \\boxed{4}", (2, 2))
WRONG = Response("so 2 + 2 is \\boxed{5}", (3,))
LETTERS = {"a": 6, "b": 7}
END = 1
"""Token ids of the lent tokenizer."""
WEIGHT = 0.05


def task(number, demonstration=None):
    return Task(id=f"t{number}", prompt=f"What is 2 + 2 ({number})?", answer="4", demonstration=demonstration)


def with_right(count, size):
    return [RIGHT] * count + [WRONG] * (size - count)


def demonstrated(batch):
    """The tasks whose stored response of the base model is in the batch."""
    return {rollout.task.id for rollout in batch.rollouts if rollout.role == "demonstrator"}


def ids_of(text):
    return [*(LETTERS[letter] for letter in text), END]


def answered(greedy):
    """What the recipe's plan makes of a task whose greedy response is this one: (role, temperature) of each rollout."""
    plan = plan_of("self")
    temperatures = []

    async def generate(request):
        temperatures.append(request.sampling.temperature)
        text = greedy.text if request.sampling.temperature == 0 else WRONG.text
        ids = np.asarray([1])
        return Completion(ids, np.zeros(1, np.float32), np.zeros(1, np.int32), StopReason.END, text, 0.0)

    async def verify(rollout):
        rollout.verdicts["verifier"] = await judged(as_verifier(plan.config.verifier), rollout.task, rollout.text)
        return rollout

    context = SimpleNamespace(
        generate=generate,
        verify=verify,
        encode=lambda task: (0,),
        by_group=lambda task: False,
        seed=lambda *path: 0,
        sampling=Sampling(plan.config.rollout.max_new_tokens),
        group_size=plan.config.rollout.group_size,
    )

    async def collected():
        made = registry.build("plan", plan.config.rollout.plan)
        return [rollout async for rollout in made(Draw(0, task(0)), context)]

    roles = sorted(rollout.role for rollout in asyncio.run(collected()))
    return roles, sorted(temperatures)


def test_only_tasks_that_the_policy_fails_greedily_are_sampled():
    """RayMaxPPOTrainer.fit: `incorrect_indices` of the greedy responses, and rollout.n 8 samples of those prompts."""
    assert answered(RIGHT) == (["baseline"], [0.0])
    assert answered(WRONG) == (["baseline"] + ["policy"] * 8, [0.0] + [1.0] * 8)
    # A group of any pass rate trains then.
    assert plan_of("self").config.algorithm.select == []


def test_winners_do_not_take_all(recipe_step):
    """The case of the paper: an easy task beside a hard one. GRPO would raise both tasks' right answers; here the easy
    one's token has only what the softmax gives it, and the hard one's rises."""
    easy, hard = Response("\\boxed{4}", (4,), role="baseline"), Response("\\boxed{4}", (5,))
    step = recipe_step("self", [task(0), task(1, "a")])
    batch = step.score([[easy], [hard] * 2 + [WRONG] * 6])
    logits = [0.0] * 8
    gradient = step.gradient(batch, logits)
    assert gradient[5] < 0
    hardly = WEIGHT * 2 * softmax(logits)[4]
    assert 0 <= gradient[4] <= hardly


def test_gradient_of_the_policy(recipe_step):
    """GRPO of the hard task, and 0.05 times the negative log-likelihood of the base model's stored response: the
    gradient of KL(base || policy) estimated from a sample of the base model."""
    step = recipe_step("self", [task(0, "abba")])
    logits = np.random.default_rng(1).normal(size=8)
    got = step.gradient(step.score([with_right(2, 8)]), logits)
    ids = [r.ids for r in with_right(2, 8)]
    # As verl has it: the deviation with n - 1, and the mean over tokens.
    reward = policy_gradient(of_the_group([1.0] * 2 + [0.0] * 6, 1e-6, unbiased=True), ids, logits, "tokens")
    shown = ids_of("abba")
    np.testing.assert_allclose(got, reward - WEIGHT * score_function(shown, logits) / len(shown), rtol=1e-9)


def test_the_kl_is_the_forward_one(recipe_step):
    """A task that is never solved has the KL's gradient alone. Where the policy has given up an answer of the base
    model's, forward KL pulls it back with nearly its whole weight; the reverse KL's pull is in proportion to the
    probability that is left."""
    step = recipe_step("self", [task(0, "a")])
    batch = step.score([[WRONG] * 8])
    logits = [-30.0, 0.0, *[-30.0] * 4, -9.0, 0.0]
    lost = softmax(logits)[LETTERS["a"]]
    assert lost < 1e-4
    # -log pi(a) and -log pi(end), over two tokens.
    expected = -WEIGHT / 2 * (1 - 2 * lost)
    assert step.gradient(batch, logits)[LETTERS["a"]] == pytest.approx(expected, rel=1e-6)
    # With both letters written by the base model as often, the gradient is 0 at its own distribution and only there.
    step = recipe_step("self", [task(0, "a"), task(1, "b")])
    batch = step.score([[WRONG] * 8, [WRONG] * 8])
    base = np.full(8, -40.0)
    base[[END, LETTERS["a"], LETTERS["b"]]] = math.log(2), 0.0, 0.0
    np.testing.assert_allclose(step.gradient(batch, base), 0, atol=1e-12)


def test_the_kl_is_on_tasks_that_are_solved_already(recipe_step):
    """A solved task has no group, and its stored response is learned beside those of the others."""
    step = recipe_step("self", [task(0, "a"), task(1, "b"), task(2)])
    solved = Response(RIGHT.text, RIGHT.ids, role="baseline")
    batch = step.score([[solved], with_right(2, 8), [solved]])
    assert demonstrated(batch) == {"t0", "t1"}
    assert {rollout.task.id for rollout in batch.rollouts if rollout.role == "policy"} == {"t1"}
    logits = np.random.default_rng(2).normal(size=8)
    reward = policy_gradient(
        of_the_group([1.0] * 2 + [0.0] * 6, 1e-6, unbiased=True), [r.ids for r in with_right(2, 8)], logits, "tokens"
    )
    shown = score_function([*ids_of("a"), *ids_of("b")], logits) / 4
    np.testing.assert_allclose(step.gradient(batch, logits), reward - WEIGHT * shown, rtol=1e-9)
