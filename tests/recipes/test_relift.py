"""ReLIFT: the tasks that a whole group failed at are imitated in steps of their own, between those of reinforcement."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, plan_of, policy_gradient, score_function

from rlvr.records import Task

TASKS = [Task(id=f"t{n}", prompt=f"What is {n}?", answer=str(n), demonstration="abba"[: n + 1]) for n in range(4)]
RIGHT, WRONG = "It is \\boxed{%d}.", "It is \\boxed{7}."


def group(number, right, ids):
    return [Response(RIGHT % number if r else WRONG, own) for r, own in zip(right, ids, strict=True)]


@pytest.fixture
def step(recipe_step):
    return recipe_step("relift", TASKS)


def test_gradient_of_a_two_token_policy(step):
    """No standard deviation, the sum over a response by 8,192, no clip however far the policy has moved, and no
    gradient of a group that failed."""
    ids = [(1,), (0, 1), (0,), (0, 0, 1)]
    groups = [group(n, right, ids) for n, right in enumerate([(1, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 0, 0)])]
    advantages = [0.75, -0.25, -0.25, -0.25, *[0] * 8, 0.5, 0.5, -0.5, -0.5]
    batch = step.score(groups)
    logits, old = [0.2, 0.2], [3.0, -1.0]
    before = np.exp(old) / np.exp(old).sum()
    expected = np.zeros(2)
    for advantage, own in zip(advantages, ids * 4, strict=True):
        for token in own:
            expected -= advantage * 0.5 / before[token] * score_function([token], logits) / (16 * 8192)
    # Both tokens are as likely: the entropy bonus of 2.5e-4 has no gradient.
    np.testing.assert_allclose(step.gradient(batch, logits, old=old), expected, rtol=1e-6)
    on_policy = policy_gradient(advantages, ids * 4, logits, "tokens") * sum(map(len, ids * 4)) / (16 * 8192)
    np.testing.assert_allclose(step.gradient(batch, logits), on_policy, rtol=1e-6)


def test_failed_groups_alone_are_gathered_and_learned(step):
    """trainer.py of TheRoadQaQ/ReLIFT@eb95454: solve_none_uids, one row each. Their demonstrations have the mean of
    -log pi over all tokens, ends included."""
    options = plan_of("relift").config.algorithm.supervised_steps
    assert (options.gather, options.warmup) == (128, None)
    ids = [(1,), (0,)]
    waiting = step.stage._supervision
    for right in ([(0, 0), (1, 0), (1, 1), (0, 0)], [(0, 1), (0, 0), (1, 1), (1, 1)]):
        step.score([group(n, own, ids) for n, own in enumerate(right)])
    assert waiting.state_dict()["waiting"] == ["t1", "t0", "t3"]
    assert not waiting.drawn(2)

    # A step that learns demonstrations, of all four tasks here, has their term alone: no reward, no entropy.
    logits = np.random.default_rng(4).normal(size=8)
    tokens = [6, 1, 6, 7, 1, 6, 7, 7, 1, 6, 7, 7, 6, 1]
    expected = -score_function(tokens, logits) / len(tokens)
    np.testing.assert_allclose(step.gradient(step.demonstrations(), logits), expected, rtol=1e-9)


def test_a_step_of_imitation_comes_when_enough_have_failed(step):
    for _ in range(32):
        step.score([group(n, (0, 0), [(1,), (0,)]) for n in range(4)])
    collected = step.stage.collect(32)
    assert len(collected.rollouts) == 128
    assert {r.task.id for r in collected.rollouts} == {"t0", "t1", "t2", "t3"}
    assert len({r.id for r in collected.rollouts}) == 128
