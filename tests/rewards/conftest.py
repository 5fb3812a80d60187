"""Batches made up for the tests of reward terms."""

from __future__ import annotations

import numpy as np
import pytest
from reward_helpers import make_batch

from rlvr.config import Config
from rlvr.rewards import RewardContext, bind, build_terms, score


@pytest.fixture
def column():
    """`column(batch, *specs, config={})`: the reward of the batch under these terms, bound to a run with that
    config."""

    def reward(batch, *specs, config=None):
        terms = build_terms(list(specs))
        tasks = list({r.task.id: r.task for r in batch.rollouts}.values())
        return score(batch, bind(terms, RewardContext(Config.model_validate(config or {}), tasks))).column("reward")

    return reward


@pytest.fixture
def shaped(column):
    """`shaped(spec, scores, lengths, groups=None)`: the reward of responses with these scores and lengths, one
    group."""

    def reward(spec, scores, lengths, groups=None, config=None, **more):
        return column(make_batch(scores, lengths, groups, **more), spec, config=config)

    return reward


@pytest.fixture
def nan():
    return np.nan
