"""Operations of a pass by hand: layers, experts, windows and layers without attention."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr.config import LoraConfig, ModelConfig, OptimConfig, ScratchConfig
from rlvr.policy import load_policy, micro_batches
from rlvr.policy.flops import ModelFlops, _active_share, peak_flops
from rlvr.policy.layer_sizes import attention_windows
from rlvr.records import Batch, Origin, Rollout, StopReason, Task


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA B200", 2250),
        ("NVIDIA A10", 125),
        ("NVIDIA A30", 165),
        ("NVIDIA L4", 121),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(name, teraflops):
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)


def rollouts(prompt, *lengths):
    ids = [np.concatenate([np.arange(prompt) + 3, np.full(n, 4 + m)]) for m, n in enumerate(lengths)]
    return Batch(
        [
            Rollout(
                id=f"g/{m}",
                task=Task("t", "?"),
                group="g",
                member=m,
                token_ids=i.astype(np.int64),
                origin=np.where(np.arange(len(i)) < prompt, Origin.PROMPT, Origin.POLICY).astype(np.int8),
                behaviour_logprobs=np.zeros(len(i), dtype=np.float32),
                policy_version=np.zeros(len(i), dtype=np.int32),
                stop=StopReason.END,
            )
            for m, i in enumerate(ids)
        ]
    )


H, MLP, L = 16, 24, 3
"""Hidden and intermediate size and layers of the model, 4 heads of 4 channels, 2 of them for keys."""


LAYER = H * H + 2 * H * 8 + H * H + 3 * H * MLP + 2 * H + 2 * 4
"""Weights of a layer: q, k and v, o, the three of the MLP, two norms, those of queries and keys; the final norm adds H
to all."""


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=2, target_modules=["q_proj"])])
@pytest.mark.parametrize(
    "options", [{"packing": False}, {"packing": True, "share_prefix": False}, {"share_prefix": True}]
)
def test_operations_of_a_pass_by_hand(options, adapter):
    scratch = ScratchConfig(hidden_size=H, intermediate_size=MLP, layers=L, heads=4, kv_heads=2, context=64)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu", adapter=adapter))
    batch, prompt, own = rollouts(10, 5, 2), 10, (5, 2)
    (rows,) = micro_batches(policy, batch, np.arange(2), [r.sampled for r in batch.rollouts], OptimConfig(**options))
    shared = "share_prefix" in options and options["share_prefix"]
    tokens = prompt + 5 + 2 if shared else 2 * prompt + 5 + 2
    pairs = prompt**2 + 5 * 15 + 2 * 12 if shared else 15**2 + 12**2
    vocabulary = policy.causal_lm.config.vocab_size
    biases = sum(p.numel() for n, p in policy.causal_lm.named_parameters() if n.endswith("bias"))
    frozen = LAYER * L + H + biases
    lora = 0 if adapter is None else L * (H * 2 + 2 * H)
    attention = 12 * L * 16 * pairs
    if adapter is None:
        want = 6 * frozen * tokens + 6 * H * vocabulary * sum(own) + attention
    else:
        want = (4 * frozen + 6 * lora) * tokens + 4 * H * vocabulary * sum(own) + attention
    model = ModelFlops.of(policy)
    assert model.of_pass(rows.computed(grad=True)) == pytest.approx(want, rel=1e-12)
    forward = 2 * (frozen + lora) * tokens + 2 * H * vocabulary * sum(own) + attention / 3
    assert model.of_pass(rows.computed(grad=False)) == pytest.approx(forward, rel=1e-12)


class Config:
    def __init__(self, **options):
        vars(self).update(options)


def test_experts_windows_and_layers_without_attention():
    assert _active_share(Config(num_experts=128, num_experts_per_tok=8)) == 8 / 128
    assert _active_share(Config(num_local_experts=32, num_experts_per_tok=4)) == 4 / 32
    assert _active_share(Config()) == 1.0
    assert attention_windows(Config(num_hidden_layers=2)) == (math.inf, math.inf)
    assert attention_windows(Config(num_hidden_layers=2, sliding_window=8)) == (8.0, 8.0)
    kinds = ["full_attention", "linear_attention", "sliding_attention"]
    assert attention_windows(Config(num_hidden_layers=3, sliding_window=8, layer_types=kinds)) == (math.inf, 8.0)
