"""Batches made up for the tests of reward terms."""

from __future__ import annotations

import numpy as np
import pytest

from reward_helpers import make_batch, reward_of


@pytest.fixture
def column():
    """`column(batch, *specs, config={})`: see `reward_of`."""
    return reward_of


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
