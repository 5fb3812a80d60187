"""Packed rows on a GPU, by the kernels of `rlvr.policy.attention` and of flex_attention, against padded rows."""

import numpy as np
import pytest
import torch

from rlvr.config import ModelConfig, OptimConfig, ScratchConfig
from rlvr.core.needs import Need
from rlvr.policy import forward, load_policy, micro_batches, microbatch
from rlvr.policy.attention_speed import AttentionSpeed
from rlvr.policy.statistics import DeferredColumns
from rlvr.records import Batch, Rollout, StopReason, Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def some_batch(trunk=0):
    """Four prompts with six responses each, of which two and two have `trunk` tokens in common."""
    rng, rollouts = np.random.default_rng(0), []
    for g in range(4):
        prompt = rng.integers(3, 50, int(rng.integers(1, 200)))
        trunks = rng.integers(3, 50, (3, trunk))
        for m in range(6):
            ids = np.concatenate([prompt, trunks[m // 2], rng.integers(3, 50, int(rng.integers(0, 150)))])
            origin = np.where(np.arange(len(ids)) < len(prompt), 0, 1).astype(np.int8)
            unknown, version = np.full(len(ids), np.nan, dtype=np.float32), np.zeros(len(ids), dtype=np.int32)
            more = (ids, origin, unknown, version, StopReason.END)
            rollouts.append(Rollout(f"{g}/{m}", Task(str(g), "?"), str(g), m, *more))
    return Batch(rollouts)


def measured(policy, batch, config):
    columns, total, later = [np.zeros(len(r), dtype=np.float32) for r in batch.rollouts], 0.0, DeferredColumns()
    for rows in micro_batches(policy, batch, np.arange(len(batch)), [r.sampled for r in batch.rollouts], config):
        logprobs = forward(policy, rows, [Need("logprobs", grad=True)])["logprobs", "current"]
        later.add(rows, logprobs, columns)
        total = total + logprobs.sum()
    later.write()
    gradient = torch.autograd.grad(total, list(policy.trainable().values()))
    return np.concatenate(columns), torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize("options", [{"share_prefix": True}, {"packing": True, "share_prefix": False}])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("window", [None, 32])
# bfloat16 has 8 bits of mantissa, 0.4 % in each product.
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_packed_rows_are_the_padded_ones(attention, options, window, dtype, close):
    scratch = ScratchConfig(architecture="mistral", hidden_size=256, layers=2, intermediate_size=512, context=512)
    policy, reference = (
        load_policy(ModelConfig(scratch=scratch, device="cuda", attention=a, dtype=dtype)) for a in (attention, "sdpa")
    )
    for one in (policy, reference):
        one.causal_lm.config.sliding_window = window
    batch = some_batch()
    got, gradient = measured(policy, batch, OptimConfig(**options))
    want, right = measured(reference, batch, OptimConfig(packing=False))
    np.testing.assert_allclose(got, want, rtol=close, atol=close)
    assert float((gradient - right).norm() / right.norm()) < close


@pytest.mark.parametrize("layout", ["packed", "shared", "tree"])
@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt_oss"])
# Wider than any rollout, or not.
@pytest.mark.parametrize("window", [1024, 32])
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_soft_caps_sinks_and_trees_are_those_of_padded_rows(architecture, layout, window, dtype, close, monkeypatch):
    """Against the same model's eager attention, which has soft-caps and sinks; both are such that they matter."""
    # Every level of sharing pays.
    monkeypatch.setattr(microbatch, "speed_of", lambda device: AttentionSpeed(pair=1.0, call=1.0))
    scratch = ScratchConfig(architecture=architecture, hidden_size=256, layers=2, intermediate_size=512, context=512)
    policy = load_policy(ModelConfig(scratch=scratch, device="cuda", attention="eager", dtype=dtype))
    policy.causal_lm.config.sliding_window = window
    for module in policy.causal_lm.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = 0.5
        if hasattr(module, "sinks"):
            torch.nn.init.constant_(module.sinks, 1.0)
    batch = some_batch(trunk=60 if layout == "tree" else 0)
    want, right = measured(policy, batch, OptimConfig(packing=False))
    options = OptimConfig(packing=True, share_prefix=layout != "packed")
    trained = [rollout.sampled for rollout in batch.rollouts]
    made = list(micro_batches(policy, batch, np.arange(len(batch)), trained, options))
    deepest = max(len(rows.spans.chain(run)) for rows in made for run in range(len(rows.spans.length)))
    assert deepest >= {"packed": 0, "shared": 1, "tree": 2}[layout] and (layout != "packed" or deepest == 0)
    got, gradient = measured(policy, batch, options)
    np.testing.assert_allclose(got, want, rtol=close, atol=close)
    assert float((gradient - right).norm() / right.norm()) < close
