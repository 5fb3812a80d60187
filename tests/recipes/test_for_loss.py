"""FoR: trajectory balance where the policy is flat and where it is proportional to the reward, and its options."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlvr.recipes.for_.trajectory_balance import TrajectoryBalance
from sequence_cases import as_batch, responses


def test_trajectory_balance_is_reinforce_where_the_policy_is_flat():
    """Equal log-probs: twice the gradient of REINFORCE on log R with the group's mean as baseline; proportional to R:
    0."""
    s = responses(1, [1.0, 0.0, 0.3, 0.9], [0, 0, 0, 0])
    s.logprobs = np.full(4, -7.0)
    batch, log_reward = as_batch(s), np.log(1e-3 + 100.0 * np.asarray(s.reward))
    (gradient,) = torch.autograd.grad(TrajectoryBalance().sequence_losses(batch).sum(), batch.logprobs)
    np.testing.assert_allclose(gradient.numpy(), -2 * (log_reward - log_reward.mean()) / 4, rtol=1e-9)
    s.logprobs = log_reward - 11.0
    batch = as_batch(s)
    value = TrajectoryBalance().sequence_losses(batch).sum()
    assert float(value.detach()) == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize(
    ("option", "problem"),
    [({"floor": 0.0}, "floor is 0, and must be above 0"), ({"scale": -1.0}, "scale is .*, and must be above 0")],
    ids=str,
)
def test_options_out_of_range_are_refused(option, problem):
    with pytest.raises(ValueError, match=problem):
        TrajectoryBalance(**option)
