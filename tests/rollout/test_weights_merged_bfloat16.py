"""An adapter over a bfloat16 base is merged in float32 and rounded once, so that small updates reach the sampler."""

from __future__ import annotations

import torch

from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.policy import load_policy
from rlvr.rollout.hf import _own_copy
from rlvr.rollout.weights import weight_buckets


def small_update():
    """(a bfloat16 policy whose adapter moves weights by about half of a rounding step, float64 merged weights by
    name)"""
    scratch = ScratchConfig(hidden_size=64, layers=2, intermediate_size=128, context=64, init_std=0.2)
    config = ModelConfig(scratch=scratch, device="cpu", dtype="bfloat16", adapter=LoraConfig(r=4, alpha=8.0))
    policy = load_policy(config)
    generator, merged = torch.Generator().manual_seed(0), {}
    with torch.no_grad():
        for name, module in policy.causal_lm.named_modules():
            if not hasattr(module, "get_delta_weight"):
                continue
            down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
            assert down.dtype == up.dtype == torch.float32
            up.copy_(1e-3 * torch.randn(up.shape, generator=generator))
            base = module.base_layer.weight
            assert base.dtype == torch.bfloat16
            merged[f"{name}.weight"] = base.double() + 2.0 * up.double() @ down.double()
    return policy, merged


def share_moved(got, base):
    return float((got != base).float().mean())


def test_what_is_sent_and_what_is_copied_is_the_float32_merge_rounded_once():
    """Merging in bfloat16 (the update rounded first) would give other weights: the float32 one is what both engines
    get."""
    policy, merged = small_update()
    base = {
        name: dict(policy.causal_lm.named_modules())[name.removesuffix(".weight")].base_layer.weight for name in merged
    }
    sent = dict(weight for bucket in weight_buckets(policy) for weight in bucket)
    copied = dict(_own_copy(policy).causal_lm.named_parameters())
    differing, moved = 0, []
    for name, exact in merged.items():
        want = exact.float().to(torch.bfloat16)
        assert sent[name].dtype == torch.float32
        for got in (sent[name].to(torch.bfloat16), copied[name]):
            assert (got != want).float().mean() < 1e-3, name  # ties of the sum in float32
        rounded_first = base[name] + (exact - base[name].double()).to(torch.bfloat16)
        differing += int((rounded_first != want).sum())
        moved.append(share_moved(want, base[name]))
    assert differing > 0, "the update is too small or too large to tell the two apart"
    assert 0.02 < sum(moved) / len(moved) < 0.98, moved
