"""The terms of an objective: schedules at a step, and the constant that all divide by."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.core.needs import REFERENCE
from rlvr.losses import ClippedPolicyLoss, KLPenalty, Objective, ObjectiveTerm, k3
from rlvr.records import Batch


def test_at_fixes_schedules_and_drops_what_weighs_nothing():
    from rlvr.core.schedules import Schedule, StepSchedule

    objective = Objective(
        (
            ObjectiveTerm(
                "policy", ClippedPolicyLoss(clip_high=Schedule(schedule="linear", start=0.2, end=0.4)), "policy"
            ),
            ObjectiveTerm("kl", KLPenalty(k3, "sequences"), "policy", StepSchedule(at={0: 0.0, 5: 0.1})),
        )
    )
    start, later = objective.at(0, 10), objective.at(5, 10)
    assert [c.name for c in start.components] == ["policy"]
    assert not any(need.model == REFERENCE for need in start.needs)
    assert later.components[0].loss.clip_high == pytest.approx(0.3)
    assert later.components[1].coef == 0.1
    assert any(need.model == REFERENCE for need in later.needs)


def test_every_component_of_a_stage_divides_by_the_same_constant(make_rollout):
    from rlvr.config.config_loading import load_config
    from rlvr.config.stage_plan import stage_plans
    from rlvr.stages.grpo.build_objective import build_objective

    loss = {"name": "clip", "average": "constant", "constant": 5}
    tree = {"run": {"steps": 1}, "algorithm": {"loss": loss, "kl": {"coef": 0.1}, "entropy": 0.1}}
    objective = build_objective(stage_plans(load_config(tree))[0], shares_weights=True)
    rollout = make_rollout([1, 2, 3, 4, 5])
    batch = Batch([rollout], {}, {"weight/policy": [rollout.sampled.astype(np.float32)]})
    assert {over.constant for over in objective.denominators(batch).values()} == {5.0}
