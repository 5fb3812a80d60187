"""DARS: the number of further responses, by the sum of absolute advantages that they bring, and a run."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.errors import ConfigError
from rlvr.recipes.dars.dars import DifficultyAdaptiveSampling


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
