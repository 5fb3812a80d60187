"""LASER: another reward's normalised column is mixed into the advantage, against a loop."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage_helpers import assert_sound, cases, of_case
from rlvr.advantages import GroupAdvantage
from rlvr.config.config_loading import make_config
from rlvr.errors import ConfigError
from rlvr.recipes.laser.laser import Blend


def blended(batch, advantage, share, least):
    """Loop by loop: (1 - share) A + share x the group-normalised column of the decided members, clipped to [-1, 1]; A
    where the column hardly differs. The deviation is over n - 1."""
    column = [max(-1.0, min(1.0, value)) for value in batch.columns["reward/other"]]
    rewards, groups = batch.columns["reward"], [r.group for r in batch.rollouts]
    result = []
    for i, value in enumerate(advantage):
        peers = [column[j] for j in range(len(column)) if groups[j] == groups[i] and math.isfinite(rewards[j])]
        mixed = value
        if math.isfinite(rewards[i]) and len(peers) > 1 and (spread := statistics.stdev(peers)) > least:
            mixed = (1 - share) * value + share * (column[i] - statistics.fmean(peers)) / (spread + 1e-4)
        result.append(mixed)
    return result


@given(case=cases, share=st.sampled_from([0.0, 0.1, 1.0]), least=st.sampled_from([0.0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_a_column_is_mixed_in(case, share, least):
    batch = of_case(case)
    batch.columns["reward/other"] = np.random.default_rng(len(case)).normal(size=len(batch))
    plain = GroupAdvantage()(batch)
    got = Blend("other", share, least, unbiased=True, bounds=(-1.0, 1.0))(batch, plain)
    np.testing.assert_allclose(got, blended(batch, plain, share, least), atol=1e-9)
    assert_sound(batch, got)
    if share == 0:
        np.testing.assert_array_equal(got, plain)


def test_a_share_that_is_none_and_a_term_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="share is 1"):
        Blend(share=1.5)
    with pytest.raises(ValueError, match="the lower one comes first"):
        Blend(bounds=(1.0, 0.0))
    config = make_config({})
    with pytest.raises(ConfigError, match=r"blend is of 'verdit', and there is no such term.*did you mean 'verdict'"):
        Blend("verdit").check(config, [])
