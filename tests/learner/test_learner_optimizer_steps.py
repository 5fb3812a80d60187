"""Optimizer steps that a batch is asked for and cannot have are refused, or said."""

from __future__ import annotations

import pytest

from rlvr.errors import ConfigError


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"rollout": {"plan": {"name": "turns", "environment": "calculator"}}},
        {"stages": [{"kind": "sft", "steps": 1}], "run": {"steps": None}},
    ],
    ids=["grpo", "turns", "sft"],
)
def test_more_updates_than_groups_are_refused_where_that_is_certain(make_trainer, over):
    with pytest.raises(ConfigError, match=r"updates_per_batch is 8.*at most 2 .rollout.prompts_per_step.*to 2 or less"):
        make_trainer({**over, "optim": {"updates_per_batch": 8}})


def half_agree(prompt, token_ids):
    """Half of the tasks are solved by every answer."""
    return 1.0 if prompt in ("0=?", "1=?", "2=?") else float(sum(token_ids) % 2)


def test_a_step_that_had_fewer_groups_is_said_once(make_trainer):
    """Groups that agree are left out, so that fewer optimizer steps are taken than were asked for."""
    over = {
        "algorithm": {"select": ["mixed_groups"]},
        "rollout": {"prompts_per_step": 4, "group_size": 2},
        "optim": {"updates_per_batch": 4, "epochs_per_batch": 2},
        "run": {"steps": 4},
    }
    output = []
    with make_trainer(over, verifier=half_agree) as trainer:
        trainer.reporting.console.message = lambda text, level="info": output.append(text)
        rows = trainer.train()
    for row in rows:
        mixed = round(row["group/count"] * (1 - row["group/zero_variance"]))
        assert row["update/steps"] == 2 * mixed
    assert any(row["update/steps"] < 8 for row in rows), "some group agreed"
    assert len([text for text in output if "optimizer steps were taken" in text]) == 1
