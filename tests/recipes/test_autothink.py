"""AutoThink: the rewards of its three stages on hand-written responses, against the authors' reweighting by a loop."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hand_written_steps import (
    PROBES,
    Response,
    clipped_gradient,
    entropy_gradient,
    moved_policy,
    of_the_group,
    probing_group,
)

from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task, Verdict
from rlvr.rewards import build_terms, score

THINKS = "so </think> \\boxed{2}"
SKIPS = "</think> \\boxed{2}"
TABLE = {(True, True): 1.0, (True, False): 0.0, (False, True): 2.0, (False, False): -1.0}
"""(thinks, right) -> the base reward"""
FARTHEST = {(True, True): 0.0, (True, False): -1.0, (False, True): 1.0, (False, False): -2.0}
"""What the reward moves to as the mode takes over the batch."""


@pytest.fixture
def rewards(make_rollout):
    """`rewards(stage, groups)` of groups of (thinks, right, length in tokens)."""

    def make(stage, groups):
        (plan,) = [plan for plan in stage_plans(find_paper("autothink").config) if plan.name == stage]
        rollouts = []
        for g, members in enumerate(groups):
            for m, (thinks, right, length) in enumerate(members):
                text = THINKS if thinks else SKIPS
                rollout = make_rollout([9] + [1] * length, prompt=1, group=f"g{g}", member=m, text=text)
                rollout.verdicts["math"] = Verdict.from_score(float(right))
                rollouts.append(rollout)
        batch = Batch(rollouts)
        score(batch, build_terms(plan.config.rewards))
        return batch.columns["reward"]

    return make


def of_the_authors(groups, alpha, beta, rate):
    """`_reweight_rewards`: the length term within right and within wrong answers, then the balance over the batch."""
    result = []
    for members in groups:
        lengths = {kind: [n for _, right, n in members if right == kind] for kind in (True, False)}
        for thinks, right, length in members:
            value, same = TABLE[thinks, right], lengths[right]
            if len(same) > 1:
                z = (length - statistics.fmean(same)) / max(statistics.stdev(same), 1e-6)
                value += math.exp(-alpha * z) - 1 if right else 1 - math.exp(-beta * z)
            result.append(value)
    flat = [(thinks, right) for members in groups for thinks, right, _ in members]
    share = sum(thinks for thinks, _ in flat) / len(flat)
    for i, (thinks, right) in enumerate(flat):
        excess = max(0.0, min(1.0, 2 * ((share if thinks else 1 - share) - rate)))
        result[i] = (1 - excess) * result[i] + excess * FARTHEST[thinks, right]
    return result


def groups_of(seed, thinking):
    rng = np.random.default_rng(seed)
    return [
        [(bool(rng.random() < thinking), bool(rng.integers(2)), int(rng.integers(1, 40))) for _ in range(8)]
        for _ in range(4)
    ]


@pytest.mark.parametrize("thinking", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    ("stage", "strength", "rate"), [("balance", 0.0, 0.5), ("both", 0.0, 1.0), ("short", 0.05, 1.0)]
)
def test_the_rewards_of_each_stage(rewards, stage, strength, rate, thinking):
    groups = groups_of(3, thinking)
    np.testing.assert_allclose(rewards(stage, groups), of_the_authors(groups, strength, strength, rate), atol=1e-12)


def test_not_thinking_pays_until_all_do_it(rewards):
    """A right answer without thinking is worth 2; where the whole batch does not think, it is worth no more than one
    with thinking, and a wrong one costs 2."""
    skips = [[(False, True, 4), (False, False, 4)]]
    assert list(rewards("balance", skips)) == [1.0, -2.0]
    assert list(rewards("both", skips)) == [2.0, -1.0]


def test_length_counts_the_other_way_for_wrong_answers(rewards):
    """The term of the third stage is small beside the table: 0.05 of a standard deviation."""
    group = [(True, True, 10), (True, True, 30), (True, False, 10), (True, False, 30)]
    short_right, long_right, short_wrong, long_wrong = rewards("short", [group])
    assert short_right > 1 > long_right
    assert long_wrong > 0 > short_wrong
    assert max(abs(short_right - 1), abs(long_wrong)) < 0.05
    # One answer of its kind has nothing to compare with.
    assert list(rewards("short", [[(True, True, 10), (False, False, 99)]])) == [1.0, -1.0]


TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
# (text, base reward); the prompt has opened <think>. A response without </think> or without a box is wrong.
RESPONSES = [
    ("so </think> \\boxed{4}", 1.0),
    ("</think>\n\n\\boxed{4}", 2.0),
    (" \n</think> It is \\boxed{4}.", 2.0),
    ("so </think> \\boxed{5}", 0.0),
    ("so \\boxed{4} </think> \\boxed{5}", 0.0),
    ("</think> \\boxed{5}", -1.0),
    ("</think> The answer is 4.", -1.0),
    ("so </think> The answer is 4.", 0.0),
    ("so \\boxed{4}", 0.0),
    ("so it is 4 </think>", 0.0),
    ("", 0.0),
]


def test_ten_responses_by_the_recipe_s_own_verifier(recipe_step):
    """deepscaler/rewards/math_reward.py and reward_types.py of github TU2021/AutoThink, commit be0bcb0."""
    assert recipe_step("autothink", [TASK], "both").rewards([text for text, _ in RESPONSES]) == [
        reward for _, reward in RESPONSES
    ]


@pytest.mark.parametrize("stage", ["balance", "both", "short"])
def test_gradient_of_each_stage(recipe_step, stage):
    """verl's GRPO (train_stage1.sh to train_stage3.sh): std with n - 1 and 1e-6, clip 0.2 on both sides, no cap on
    negative advantages, the mean over tokens, an entropy bonus of 0.001, and no weight for the engine's log-probs."""
    logits, old = moved_policy(12)
    step = recipe_step("autothink", [TASK], stage)
    # As many that think as do not: no mode is too frequent.
    group = [*probing_group(THINKS.replace("2", "4"), SKIPS), Response(SKIPS, (1, 2, 3)), Response(THINKS, (4,))]
    batch = step.score([group])
    rewards = batch.column("reward").tolist()
    if stage != "short":
        assert rewards == [1.0, -1.0] * len(PROBES) + [-1.0, 0.0]
    ids = [response.ids for response in group]
    expected = clipped_gradient(of_the_group(rewards, 1e-6, True), ids, logits, old, "tokens")
    expected -= 0.001 * entropy_gradient(logits)
    for engine in (None, np.linspace(1, 0, 12).tolist()):
        got = step.gradient(batch, logits, old=old, engine=engine)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
