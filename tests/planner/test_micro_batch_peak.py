"""The peak of one micro-batch of the update, measured on fake tensors."""

from __future__ import annotations

import pytest
import torch
from fake_peak import LiveBytes, fake_policy, like_a_gpu, measure, micro_batch, rollouts_of
from torch._subclasses.fake_tensor import FakeTensorMode

from rlvr.config import OptimConfig

SMALL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
}
WAYS = {
    "padded": {"packing": False},
    "packed": {"packing": True, "share_prefix": False},
    "shared": {"share_prefix": True},
}


def test_storages_are_counted_until_the_last_reference_to_them_is_gone():
    before = torch.zeros(1000)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes([before]) as live:
        first = torch.zeros(1000)
        view = first[:10]
        second = first * 2
        assert (live.now, live.peak) == (8000, 8000)
        first.add_(before)
        del first
        assert live.now == 8000  # `view` is of the same storage
        del view
        assert (live.now, live.peak) == (4000, 8000)
        leaf = torch.zeros(100, 100, requires_grad=True)
        total = (leaf.exp() * second.sum()).sum()  # keeps the exponentials and the factor
        assert live.now == 4000 + 2 * 40_000 + 4 + 4
        total.backward()
        del total
    assert live.now == 4000 + 2 * 40_000  # `second`, the leaf and its gradient


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", list(WAYS))
def test_forward_head_loss_and_backward_read_no_value_from_the_device(way, checkpointing):
    """Fake tensors have none: an operation whose result depends on one raises."""
    with like_a_gpu(all_tiles=True):
        policy = fake_policy(SMALL, gradient_checkpointing=checkpointing)
        rows = micro_batch(policy, rollouts_of(2, 3, 40, 300), OptimConfig(**WAYS[way]))
        peak = measure(policy, rows)
    parameters = 2 * 64 * 5000 + 64 + 2 * (64 * (64 + 2 * 32) + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert peak.weights == peak.gradients == 4 * parameters
    assert peak.rest > 4 * 64 * 5000  # a gradient of the head, beside much else
