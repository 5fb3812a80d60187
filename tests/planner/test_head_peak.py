"""The peak of the fused LM head's tensors at the sizes of published models, on tensors without contents, against the
number of the memory plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fake_peak import GPU_MEMORY, first_and_last, head_like_a_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.planner import micro_batch as planner_micro_batch
from rlvr.planner import shape_of
from rlvr.planner.decoder_passes import LiveBytes, Way
from rlvr.planner.micro_batch import logits_bytes
from rlvr.policy import fused_head
from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.model import Head

MIB = 1 << 20
HALF, SINGLE = torch.bfloat16, torch.float32
SIZES = {
    "Qwen2.5-0.5B": (896, 151936),
    "Qwen2.5-7B": (3584, 152064),
    "Qwen3-30B-A3B": (2048, 151936),
    "Llama-3.2-1B": (2048, 128256),
    "Gemma 2, capped": (2304, 256000),
}
"""Hidden size and vocabulary, of the models' own config.json on the Hugging Face hub."""
KEPT = {"plain": (SINGLE, True), "DeepSpeed": (HALF, True), "frozen": (HALF, False)}
"""The type of the head's weight, and whether it trains."""


def head_peak(width, vocabulary, tokens, kept, trains, cap, compute=HALF):
    """Bytes at the peak of the head's forward and backward pass, beside inputs and weight."""
    hidden = torch.empty(tokens, width, dtype=compute, requires_grad=True)
    weight = torch.empty(vocabulary, width, dtype=kept, requires_grad=trains)
    ids = torch.empty(tokens, dtype=torch.int64)
    temperature = torch.empty(tokens)
    with LiveBytes([hidden, weight, ids, temperature]) as live:
        asked = {"logprobs": True, "entropy": True}
        head = Head((hidden,), (weight,), cap=cap)
        values = fused_statistics(head, temperature, asked, ids, id_range=(0, 1), common_temperature=1.0)
        total = values["logprobs"].sum() + values["entropy"].sum()
        del values
        live.in_backward = True
        total.backward()
    return live.peak


def planned(width, vocabulary, tokens, kept, trains, cap, memory, compute=HALF):
    """The bytes of the plan: the buffers, the gradient of the hidden states twice, and that of the weight."""
    shape = dataclasses.replace(
        shape_of(ModelConfig(scratch=ScratchConfig(), device="cpu")),
        hidden=width,
        vocabulary=vocabulary,
        head_trained=vocabulary * width if trains else 0,
        capped=cap is not None,
    )
    buffers = logits_bytes(shape, Way(compute, kept, False, True), tokens, memory)
    narrow = 0 if compute == SINGLE else compute.itemsize
    return buffers, tokens * width * (4 + narrow) + (vocabulary * width * kept.itemsize if trains else 0)


@pytest.mark.parametrize(
    ("name", "weights", "kernels", "tokens", "memory"),
    [
        *((name, weights, True, 16384, GPU_MEMORY) for name in SIZES for weights in KEPT),
        *((name, "plain", False, 16384, GPU_MEMORY) for name in SIZES),
        ("Qwen2.5-7B", "DeepSpeed", False, 16384, GPU_MEMORY),
        ("Qwen2.5-7B", "frozen", False, 16384, GPU_MEMORY),
        ("Qwen2.5-7B", "plain", True, 2000, GPU_MEMORY),
        ("Qwen2.5-7B", "plain", False, 2000, 24 << 30),
        ("Qwen2.5-7B", "DeepSpeed", True, 16384, 24 << 30),
    ],
    ids=str,
)
def test_the_plan_of_the_head_is_its_peak(name, weights, kernels, tokens, memory, monkeypatch):
    sizes = *SIZES[name], tokens, *KEPT[weights], 30.0 if "capped" in name else None
    monkeypatch.setattr(planner_micro_batch, "has_triton", lambda: kernels)
    buffers, rest = planned(*sizes, memory)
    head_like_a_gpu(monkeypatch, kernels, memory)
    # Tiles follow each other in the same memory.
    monkeypatch.setattr(fused_head, "tiles", first_and_last)
    with FakeTensorMode():
        peak = head_peak(*sizes)
    # Without what is known anyway (gradients), so that it is the buffers that are within a tenth.
    assert buffers == pytest.approx(peak - rest, rel=0.1), (buffers / MIB, (peak - rest) / MIB)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("tokens", [20, 4096])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_the_plan_of_the_head_is_its_peak_on_a_cpu(dtype, tokens, cap, monkeypatch):
    """Twenty tokens have so few logits that they are kept in the forward pass."""
    sizes = 896, 151936, tokens, SINGLE, True, cap
    buffers, rest = planned(*sizes, None, compute=dtype)
    monkeypatch.setattr(fused_head, "tiles", first_and_last)
    with FakeTensorMode():
        peak = head_peak(*sizes, compute=dtype)
    assert buffers == pytest.approx(peak - rest, rel=0.1), (buffers / MIB, (peak - rest) / MIB)


@pytest.mark.parametrize(
    ("weights", "kernels", "mib"),
    [
        # A tile of 2,048 x 16,384: 64 MiB in bfloat16, 128 in float32. 16,384 rows of the weight: 112 MiB and 224.
        ("plain", True, 64 + 112),
        ("DeepSpeed", True, 64 + 224),
        ("frozen", True, 64),
        ("plain", False, 128 + 128 + 64 + 112),
        ("DeepSpeed", False, 128 + 128 + 64 + 224),
    ],
)
def test_the_buffers_of_a_7b_head_by_hand(weights, kernels, mib, monkeypatch):
    monkeypatch.setattr(planner_micro_batch, "has_triton", lambda: kernels)
    buffers, _ = planned(3584, 152064, 16384, *KEPT[weights], None, GPU_MEMORY)
    assert buffers == mib * MIB
