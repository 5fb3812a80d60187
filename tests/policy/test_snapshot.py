"""A reference that follows the policy moves, whatever type the policy computes in."""

from __future__ import annotations

import pytest
import torch

from rlvr.distributed import World
from rlvr.distributed.shares import load_reference, saved_reference
from rlvr.policy import Snapshot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moving_average_moves_in_any_type(make_policy, dtype):
    """500 steps of mix 0.01 towards a policy that is 5 % away: 1 - 0.99^500 of the way at every weight, and saved
    so."""
    policy = make_policy()
    policy.model.to(dtype)
    reference = Snapshot(policy, follows=True)
    start = {name: p.detach().double() for name, p in policy.trainable().items()}
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.mul_(1.05)
    for _ in range(500):
        reference.follow(0.01)
    for name, parameter in policy.trainable().items():
        want = start[name] + (1 - 0.99**500) * (parameter.detach().double() - start[name])
        torch.testing.assert_close(reference.weights[name].double(), want, rtol=1e-4, atol=1e-6)
    own = {name: p.detach().clone() for name, p in policy.trainable().items()}
    with reference.in_place():
        for name, parameter in policy.trainable().items():
            assert parameter.dtype == dtype and torch.equal(parameter, reference.weights[name].to(dtype))
    assert all(torch.equal(p, own[name]) and p.dtype == dtype for name, p in policy.trainable().items())
    saved = saved_reference(reference, World())
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    other = Snapshot(policy, follows=True)
    load_reference(other, saved)
    assert all(torch.equal(other.weights[name], reference.weights[name]) for name in other.weights)


def test_a_reference_that_stays_costs_no_more_than_the_weights(make_policy):
    policy = make_policy()
    policy.model.to(torch.bfloat16)
    assert {tensor.dtype for tensor in Snapshot(policy).weights.values()} == {torch.bfloat16}
