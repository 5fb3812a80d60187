"""SCoRe: the credit of two attempts, against the paper's objective worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, clipped_gradient, k3_gradient

from rlvr import registry
from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Origin, Segment, Task, Verdict
from rlvr.rewards import build_terms, score

FIRST, SECOND = [1, 2], [4, 5, 6]
"""Tokens of the two attempts; token 0 is the prompt, token 3 the instruction between them."""


@pytest.fixture
def credit(make_rollout):
    """`credit(stage, [(r1, r2), ...])`: the recipe's advantage of the first and the second attempt of each
    conversation, r2 None where it was cut off in the first."""

    def make(stage, attempts):
        (plan,) = [plan for plan in stage_plans(find_paper("score").config) if plan.name == stage]
        rollouts = []
        for member, (r1, r2) in enumerate(attempts):
            rollout = make_rollout([9] * (3 if r2 is None else 7), prompt=1, member=member)
            rollout.verdicts["turn 1"] = Verdict.from_score(r1)
            rollout.segments = [Segment("turn", 1, 3)]
            if r2 is not None:
                rollout.origin[3] = Origin.TOOL
                rollout.verdicts["turn 2"] = Verdict.from_score(r2)
                rollout.segments += [Segment("tool", 3, 4), Segment("turn", 4, 7)]
            rollouts.append(rollout)
        batch = score(Batch(rollouts), build_terms(plan.config.rewards))
        advantage = registry.build("advantage", plan.config.algorithm.advantage)
        advantage.check(plan.config, [])
        result = []
        for values, (_, r2) in zip(advantage(batch), attempts, strict=True):
            own = [values[FIRST]] + ([values[SECOND]] if r2 is not None else [])
            outside = np.delete(values, [*FIRST, *(SECOND if r2 is not None else [])])
            assert not outside.any()
            assert all(len(set(tokens)) == 1 for tokens in own)
            result.append([float(tokens[0]) for tokens in own])
        return result

    return make


ALL = [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]


def against_the_others(values):
    return [v - (sum(values) - v) / (len(values) - 1) for v in values]


def test_each_attempt_has_its_own_reward(credit):
    got = credit("second", ALL)
    first = against_the_others([r1 for r1, _ in ALL])
    second = against_the_others([r2 + 10 * (r2 - r1) for r1, r2 in ALL])
    np.testing.assert_allclose(got, list(zip(first, second, strict=True)), rtol=1e-12)


def test_a_right_first_attempt_is_paid_and_never_charged_for_the_bonus(credit):
    """With the sum 11 r2 - 9 r1 on both attempts, a right first attempt would lose by being right."""
    by_case = dict(zip(ALL, credit("second", ALL), strict=True))
    for r2 in (0.0, 1.0):
        assert by_case[1.0, r2][0] > 0 > by_case[0.0, r2][0]
    # The first attempt's credit does not depend on the second one's outcome.
    assert by_case[1.0, 0.0][0] == by_case[1.0, 1.0][0]
    # Progress is paid most, a change for the worse is punished most, and to stay right is worth little.
    ordered = sorted(ALL, key=lambda case: by_case[case][1])
    assert ordered == [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]


def test_the_first_stage_rewards_the_second_attempt_alone(credit):
    got = credit("first", ALL)
    assert [first for first, _ in got] == [0, 0, 0, 0]
    np.testing.assert_allclose([second for _, second in got], against_the_others([0, 1, 0, 1]), rtol=1e-12)


def test_a_conversation_without_a_second_attempt_is_not_compared_with_second_attempts(credit):
    got = credit("second", [(1.0, None), (0.0, 1.0), (0.0, 0.0)])
    np.testing.assert_allclose([values[0] for values in got], against_the_others([1, 0, 0]), rtol=1e-12)
    np.testing.assert_allclose([values[1] for values in got[1:]], against_the_others([11, 0]), rtol=1e-12)


def test_the_strict_kl_of_the_first_stage_is_on_the_first_attempt():
    first, second = [plan.config.algorithm.kl for plan in stage_plans(find_paper("score").config)]
    assert first.coef * first.scale.factors["1"] == pytest.approx(0.1)
    assert first.scale.other == 1.0
    assert second.coef == 0.01 and second.scale is None


LONGEST = 4096
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"
ATTEMPTS = [
    # (text, tokens) of the first and of the second attempt
    ((WRONG, (1, 1)), (WRONG, (2,))),
    ((WRONG, (1,)), (RIGHT, (2, 0, 1))),
    ((RIGHT, (0, 2)), (WRONG, (1, 1))),
    ((RIGHT, (2,)), (RIGHT, (0,))),
]


@pytest.mark.parametrize(("stage", "factor"), [("first", 10), ("second", 1)])
def test_gradient_of_each_stage(recipe_step, stage, factor):
    """REINFORCE with each attempt's own credit, and a KL of 0.01, ten times as strong on the first attempt in stage I
    (configs/math.yaml of BY571/SCoRe, commit 3e0d90e); all divided by the longest length, which is chosen here."""
    step = recipe_step("score", [Task(id="t", prompt="What is 2 + 2?", answer="4")], stage)
    batch = step.batch_of(step.sample(4, lambda member, turn: Response(*ATTEMPTS[member][turn])))
    logits, reference = [0.0, 0.9, -0.4], [0.3, -0.6, 0.2]
    one, two = ([float(attempts[turn][0] == RIGHT) for attempts in ATTEMPTS] for turn in (0, 1))
    if stage == "first":
        credits = [[0.0] * 4, against_the_others(two)]
    else:
        credits = [
            against_the_others(one),
            against_the_others([b + 10 * (b - a) for a, b in zip(one, two, strict=True)]),
        ]
    expected = np.zeros(3)
    for turn, weight in ((0, 0.01 * factor), (1, 0.01)):
        ids = [attempts[turn][1] for attempts in ATTEMPTS]
        expected += clipped_gradient(credits[turn], ids, logits, logits, "constant", longest=LONGEST)
        expected += weight * k3_gradient(ids, logits, reference, "constant", LONGEST)
    got = step.gradient(batch, logits, reference=reference)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)
