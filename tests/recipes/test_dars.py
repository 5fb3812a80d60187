"""DARS: the number of further responses, by the sum of absolute advantages that they bring, and a run."""

from __future__ import annotations

import numpy as np
import pytest
from hand_written_steps import Response, clipped_gradient, entropy_gradient, moved_policy, plan_of, probing_group

from rlvr.errors import ConfigError
from rlvr.recipes.dars.dars import DifficultyAdaptiveSampling
from rlvr.records import Task


def absolute_advantages(right: float, responses: int) -> float:
    """The sum of |reward - mean| of a group with a share `right` of right responses, counted one by one."""
    return right * responses * (1 - right) + (1 - right) * responses * right


@pytest.mark.parametrize("schedule", ["equal", "hardness"])
@pytest.mark.parametrize("first", [4, 8, 16])
def test_further_responses_bring_a_hard_prompt_to_its_sum_and_no_further(schedule, first):
    """The sum that a prompt has at a pass rate of one half; with `hardness` times 2 (1 - u)."""
    plan = DifficultyAdaptiveSampling(schedule, most=10_000)
    for right in range(first + 1):
        u = right / first
        further = plan.further(u, first)
        if u >= 0.5:
            assert further == 0
            continue
        u = u or 0.5 / first  # the authors' pass rate of a group without a right response
        wanted = absolute_advantages(0.5, first) * (2 * (1 - u) if schedule == "hardness" else 1)
        assert absolute_advantages(u, first + further) >= wanted - 1e-9
        assert absolute_advantages(u, first + further - 1) < wanted


def test_the_authors_own_figures():
    """With their n of 8 and n_max of 32 and 64, by hand: at u = 1/8 each response has 2 u (1 - u) = 0.21875, and
    4 / 0.21875 is 18.3, so that 11 more are needed; hardness-weighted 7 / 0.21875 = 32, so 24."""
    equal = DifficultyAdaptiveSampling("equal", 32)
    assert [equal.further(right / 8, 8) for right in range(9)] == [24, 11, 3, 1, 0, 0, 0, 0, 0]
    hard = DifficultyAdaptiveSampling("hardness", 64)
    assert [hard.further(right / 8, 8) for right in range(9)] == [56, 24, 8, 3, 0, 0, 0, 0, 0]


def test_a_run_samples_more_where_the_first_responses_were_wrong(make_trainer):
    rollout = {"group_size": 4, "prompts_per_step": 6, "plan": {"name": "dars", "most": 9}}
    trainer = make_trainer({"rollout": rollout})
    trainer.train(2)
    plan = DifficultyAdaptiveSampling("equal", 9)
    sizes = set()
    for group in trainer.batch.groups():
        members = sorted(group.rollouts, key=lambda one: one.member)
        assert [one.member for one in members] == list(range(len(members)))
        rate = float(np.mean([one.verdict.score for one in members[:4]]))
        assert len(members) == 4 + plan.further(rate, 4)
        sizes.add(len(members))
    assert len(sizes) > 1
    assert all(row["grad_norm"] > 0 for row in trainer.metrics)


def test_no_room_for_further_responses_is_refused(make_trainer):
    with pytest.raises(ConfigError, match=r"most is 4, and has to be above rollout\.group_size, 4"):
        make_trainer({"rollout": {"group_size": 4, "plan": {"name": "dars", "most": 4}}})


TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
RIGHT, WRONG = "\\boxed{4}", "\\boxed{5}"


@pytest.mark.parametrize("right", range(9))
def test_the_recipe_samples_more_of_a_hard_prompt(recipe_step, right):
    """experiments/DARS-7B-ET-Breadth.sh of yangzhch6/DARS, commit 9b21b71: at most 32 in all after 8, so that the sums
    of the absolute advantages are those of a pass rate of one half."""
    step = recipe_step("dars", [TASK])
    rollouts = step.sample(8, lambda member, turn: Response(RIGHT if member < right else WRONG))
    assert len(rollouts) - 8 == [24, 11, 3, 1, 0, 0, 0, 0, 0][right]


def test_gradient_of_the_recipe(recipe_step):
    """Centred rewards without a deviation, of the groups with a difference alone; clip 0.2; sums over tokens divided by
    3,072 (compute_policy_loss of verl/verl/trainer/ppo/core_algos.py), and an eighth of the entropy bonus of 0.001,
    which is theirs beside a mean over the tokens of a micro-batch of 24,576. No weight for the engine's log-probs."""
    logits, old = moved_policy(12)
    tasks = [TASK, Task(id="u", prompt="What is 1 + 3?", answer="4"), Task(id="v", prompt="What is 4?", answer="4")]
    step = recipe_step("dars", tasks)
    group = [*probing_group(RIGHT, WRONG), Response(WRONG, (1, 2, 3)), Response(WRONG, (5,))]
    batch = step.score([group, [Response(RIGHT, (9,))] * 8, [Response(WRONG, (10,))] * 8])
    assert {rollout.task.id for rollout in batch.rollouts} == {"t"}
    rate = 8 / 18
    advantages = [float(response.text == RIGHT) - rate for response in group]
    np.testing.assert_allclose(batch.column("advantage"), advantages, rtol=1e-9)
    ids = [response.ids for response in group]
    expected = clipped_gradient(advantages, ids, logits, old, "constant", longest=3072)
    tokens = sum(map(len, ids))
    expected -= 0.001 / 8 * tokens / (len(ids) * 3072) * entropy_gradient(logits)
    for engine in (None, np.linspace(1, 0, 12).tolist()):
        got = step.gradient(batch, logits, old=old, engine=engine)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-15)


def test_two_passes_over_the_whole_batch():
    """ppo_epochs 2 with update_actor_full_ministep: the clip acts in the second one alone."""
    optim = plan_of("dars").config.optim
    assert (optim.updates_per_batch, optim.epochs_per_batch) == (1, 2)


def test_the_norm_is_cut_where_the_authors_cut_that_of_their_sum():
    """compute_policy_loss sums over responses, and update_policy_full_ministep divides by a 64th of the responses of a
    device (ppo_micro_batch_size: 64 times n, 8, over 8 devices in fsdp_workers.py): 64 times the mean, cut to norm
    1."""
    limit = plan_of("dars").config.optim.max_grad_norm
    for norm in (0.001, 0.01, 0.02, 5.0):
        assert 64 * min(limit, norm) == pytest.approx(min(1.0, 64 * norm))
