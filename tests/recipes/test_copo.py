"""COPO: the blend of local and global losses that the authors call by that name, by a loop."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import numpy as np
import pytest
from hand_written_steps import PROBES, Response, clipped_gradient, moved_policy

from rlvr import registry
from rlvr.config.config_loading import make_config
from rlvr.config.stage_plan import stage_plans
from rlvr.errors import ConfigError
from rlvr.recipes.papers import find_paper
from rlvr.records import Batch, Task, Verdict, VerdictStatus

K, B, EPSILON = 5.0, 1.0, 1e-6
"""soft_blending_k and soft_blending_b of verl/run_copo.sh"""


@pytest.fixture
def advantages(make_rollout):
    """`advantages(groups)` of (answer, reward), by the recipe's own estimator."""

    def make(groups):
        rollouts, rewards = [], []
        for g, members in enumerate(groups):
            for m, (answer, reward) in enumerate(members):
                rollout = make_rollout([9, 1], prompt=1, group=f"g{g}", member=m)
                rollout.verdicts["v"] = Verdict(VerdictStatus.WRONG, reward, answer=answer)
                rollouts.append(rollout)
                rewards.append(reward)
        batch = Batch(rollouts, {"reward": np.asarray(rewards)})
        return registry.build("advantage", find_paper("copo").config.algorithm.advantage)(batch)

    return make


def of_the_authors(groups):
    """`soft-with-zero` with reward_coef_flg off: the blended advantage of each response."""
    return [local + over_batch for local, over_batch in shares_of_the_authors(groups)]


def shares_of_the_authors(groups):
    """(weight x local, (1 - weight) x global) of each response."""
    means = [statistics.fmean(reward for _, reward in members) for members in groups]
    result = []
    for members, mean in zip(groups, means, strict=True):
        over_batch = (mean - statistics.fmean(means)) / (statistics.stdev(means) + EPSILON)
        rewards = [reward for _, reward in members]
        shares = [count / len(members) for count in Counter(answer for answer, _ in members).values()]
        entropy = -math.fsum(p * math.log2(p) for p in shares)
        for reward in rewards:
            local = (reward - mean) / (statistics.stdev(rewards) + EPSILON)
            weight = 1 / (1 + math.exp(-K * (entropy - B))) if reward != 0 else 0.0
            result.append((weight * local, (1 - weight) * over_batch))
    return result


@pytest.mark.parametrize("seed", range(4))
def test_the_shipped_blend_equals_a_loop(advantages, seed):
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(5):
        answers = rng.integers(0, 4, 6)
        groups.append([(str(answer), float(answer == 0)) for answer in answers])
    np.testing.assert_allclose(advantages(groups), of_the_authors(groups), rtol=0, atol=1e-9)


def test_groups_that_agree_learn_from_their_rank_and_wrong_answers_from_it_alone(advantages):
    """GRPO gives the first two groups nothing. All wrong answers of the mixed group have its global advantage, 0 here,
    where GRPO would push them down."""
    right = [("4", 1.0)] * 6
    wrong = [("5", 0.0)] * 6
    mixed = [("4", 1.0)] * 3 + [("5", 0.0), ("6", 0.0), ("7", 0.0)]
    got = advantages([right, wrong, mixed]).reshape(3, 6)
    assert (got[0] > 0.9).all() and (got[1] < -0.9).all()
    np.testing.assert_allclose(got[2, 3:], 0, atol=1e-9)
    # Entropy 1.79 bits: the right ones have 98 % of GRPO's advantage, sqrt(5 / 6).
    weight = 1 / (1 + math.exp(-5 * (0.5 * 1 + 3 / 6 * math.log2(6) - 1)))
    np.testing.assert_allclose(got[2, :3], weight * math.sqrt(5 / 6), rtol=1e-4)


def test_gradient_of_the_recipe(recipe_step):
    """verl/run_copo.sh of hijih/copo-code, commit c15c75f: clip 0.2 on both sides and at most 3 times a negative
    advantage, the mean over each response, no KL, no entropy bonus, and no weight for the engine's log-probs."""
    logits, old = moved_policy(12)
    step = recipe_step("copo", [Task(id=f"t{i}", prompt=f"What is {i} + 2?", answer="4") for i in range(2)])
    # Each token that has moved with the right answer and with a wrong one, in a response of two and in one of one.
    mixed = [(answer, (1 + i, *more)) for i in range(len(PROBES)) for answer, more in (("4", (9,)), ("5", ()))]
    hard = [("5", (1 + i,)) for i in range(len(PROBES))] + [("4", (8, 4, 1))]
    groups = [mixed, hard]
    batch = step.score([[Response(f"\\boxed{{{answer}}}", ids) for answer, ids in group] for group in groups])
    shares = shares_of_the_authors([[(answer, float(answer == "4")) for answer, _ in group] for group in groups])
    local, over_batch = zip(*shares, strict=True)
    advantages = np.add(local, over_batch)
    np.testing.assert_allclose(batch.column("advantage"), advantages, rtol=1e-9)
    assert min(advantages) < 0 < max(advantages)
    ids = [ids for group in groups for _, ids in group]
    # compute_policy_loss_with_global: global_pg_losses * (1 - weight) + pg_losses * weight, each clipped by itself.
    expected = sum(clipped_gradient(side, ids, logits, old, "sequences", cap=3.0) for side in (local, over_batch))
    for engine in (None, np.linspace(1, 0, 12).tolist()):
        got = step.gradient(batch, logits, old=old, engine=engine)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    # The right answers of a prompt that did worse than the others are pushed up and down: no clip of the sum does that.
    assert any(up > 0 > down for up, down in shares)
    of_the_sum = clipped_gradient(advantages, ids, logits, old, "sequences", cap=3.0)
    assert np.abs(expected - of_the_sum).max() > 1e-3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"advantage": {"name": "group"}},
            "the loss 'clip_local_and_global' reads the column 'advantage/local', which the advantage 'group' does not "
            "make: set algorithm.advantage to consistency, or choose another loss",
        ),
        (
            {"modifiers": ["whiten"]},
            "the loss 'clip_local_and_global' reads the column 'advantage/local' as the advantage 'consistency' makes "
            "it, which algorithm.modifiers does not change: leave algorithm.modifiers out, or choose another loss",
        ),
    ],
)
def test_the_loss_is_refused_where_the_advantage_has_no_shares_or_they_would_not_be_changed(changed, message):
    tree = find_paper("copo").tree
    (plan,) = stage_plans(make_config({**tree, "algorithm": {**tree["algorithm"], **changed}}))
    with pytest.raises(ConfigError) as refused:
        registry.find("stage", "grpo").check_plan(plan)
    assert str(refused.value) == message
