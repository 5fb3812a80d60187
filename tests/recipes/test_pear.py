"""PEAR: the reward by the entropies of the two phases of a response, worked by hand."""

from __future__ import annotations

import numpy as np

from reward_helpers import make_rollout, reward_of
from rlvr.records import Batch


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_the_entropies_of_the_phases():
    """One response of 3 tokens after a prompt of 2, and one without a token."""
    batch = Batch([make_rollout("g", 0, 3), make_rollout("g", 1, 0)])
    values = [0.2, 0.4, 0.9]
    batch.token_columns["entropy/current"] = [np.float32([np.nan, np.nan, *values]), np.float32([np.nan, np.nan])]
    batch.rollouts[0].text = "a</think>b"
    batch.rollouts[0].char_ends = np.asarray([-1, -1, 1, 9, 10])
    phases = {"name": "phase_entropy", "alpha": 0.1}
    close(reward_of(batch, phases), [-(0.3 - 0.09), 0])
    close(reward_of(batch, {"name": "phase_entropy", "alpha": 5}), [0, 0])
    batch.rollouts[0].text = "no marker!"
    close(reward_of(batch, phases), [-0.5, 0])
