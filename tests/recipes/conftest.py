"""A fixture that opens a recipe's stage for responses that are written by hand."""

from __future__ import annotations

import pytest
from hand_written_steps import open_step, plan_of


@pytest.fixture(scope="session")
def lent_policy():
    """A tiny policy whose tokenizer writes the letters a and b; nothing is computed with it."""
    from rlvr.config import ModelConfig, ScratchConfig
    from rlvr.policy import load_policy

    scratch = ScratchConfig(hidden_size=8, heads=1, kv_heads=1, layers=1, intermediate_size=8, alphabet="ab")
    return load_policy(ModelConfig(scratch=scratch, device="cpu"), 0)


@pytest.fixture
def recipe_step(lent_policy):
    """`recipe_step(slug, tasks, stage="grpo")`: the recipe's stage, opened for these tasks; with tiny models in the
    folder `models` in the place of its frozen ones, and the judge at the url `judge`."""

    def make(slug, tasks, stage="grpo", models=None, judge=None):
        return open_step(lent_policy, plan_of(slug, stage, models, judge), tasks)

    return make
