"""The peak of one micro-batch of the update, measured on fake tensors, against the plan of it."""

from __future__ import annotations

import json

import pytest
import torch
from fake_peak import GPU_MEMORY, fake_policy, like_a_gpu, measure, micro_batch, rollouts_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import ModelConfig, OptimConfig
from rlvr.planner import micro_batch as planner_micro_batch
from rlvr.planner import micro_batch_bytes, shape_of
from rlvr.planner.decoder_passes import LiveBytes

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


@pytest.fixture(autouse=True)
def planned_with_triton(monkeypatch):
    monkeypatch.setattr(planner_micro_batch, "has_triton", lambda: True)


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


EXPERTS = SMALL | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_take_on_fake_tensors_what_they_take_on_real_ones(dtype):
    """Under autocast, with experts as transformers has them: float32 weights stay what they are."""

    def peaks():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**EXPERTS), dtype=dtype)
        layer = model.base_model.layers[0].mlp
        hidden = torch.ones(1, 512, 64, requires_grad=True)
        gradients = []
        for tensor in (hidden, *layer.parameters()):
            tensor.grad = torch.zeros_like(tensor)
            gradients.append(tensor.grad)
        with LiveBytes([*layer.parameters(), *gradients, hidden]) as live, torch.autocast("cpu", torch.bfloat16):
            out = layer(hidden).sum()
            kept = live.now
            live.in_backward = True
            out.backward()
        return kept, live.peak

    real = peaks()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert peaks() == pytest.approx(real, rel=0.02)
    assert real[0] > 512 * 2 * (64 + 3 * 96 + 2 * 64) * dtype.itemsize  # two experts for each token


QWEN = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False, "max_position_embeddings": 131072}
MODELS = {
    "Qwen2.5-0.5B": QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen2.5-32B": QWEN
    | {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    },
}
"""The models' own config.json on the Hugging Face hub, as far as it decides the sizes."""
MODELS["window"] = MODELS["Qwen2.5-0.5B"] | {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 0}
LORA = {"adapter": {"r": 16}}
SIZES = {4096: (1, 2, 512, 1536), 16384: (2, 4, 512, 1536), 17000: (1, 2, 500, 8000), 32768: (2, 4, 1024, 3072)}
"""Tokens of rows without shared prefixes: (groups, rollouts of a group, tokens of the longest prompt, tokens of a
completion)."""


def compare(folder, name, tokens, way="packed", layers=None, deepspeed=False, **options):
    """(planned, measured) bytes."""
    described = MODELS[name] | ({"num_hidden_layers": layers} if layers else {})
    groups, members, prompt, completion = SIZES[tokens]
    with like_a_gpu():
        policy = fake_policy(described, deepspeed, **options)
        rows = micro_batch(policy, rollouts_of(groups, members, prompt, completion), OptimConfig(**WAYS[way]))
        peak = measure(policy, rows, gradients_stay=not deepspeed)
    (folder / "config.json").write_text(json.dumps(described))
    config = ModelConfig(path=str(folder), dtype="bfloat16", device="cpu", **options)
    planned = micro_batch_bytes(
        shape_of(config),
        config,
        rows.input_ids.numel(),
        len(rows.flat),
        prompt + completion,
        padded=way == "padded",
        deepspeed=deepspeed,
        gpu_memory=GPU_MEMORY,
    )
    return sum(planned.values()), peak.rest


WHOLE = [
    ("Qwen2.5-0.5B", 4096, {"gradient_checkpointing": True}),
    ("Qwen2.5-0.5B", 16384, {"way": "padded"}),
    ("Qwen2.5-0.5B", 16384, {"way": "shared"}),
    ("Qwen2.5-0.5B", 32768, {"way": "shared", "gradient_checkpointing": True}),
    ("Qwen2.5-1.5B", 16384, {"gradient_checkpointing": True}),
    ("Qwen2.5-1.5B", 32768, {}),
    ("Qwen2.5-7B", 4096, {"gradient_checkpointing": True}),
    ("Qwen2.5-7B", 16384, {"deepspeed": True}),
    ("Qwen2.5-7B", 32768, {"deepspeed": True, "gradient_checkpointing": True}),
    ("Qwen2.5-7B", 16384, {"gradient_checkpointing": True, **LORA}),
    ("Qwen2.5-32B", 32768, {"deepspeed": True, "gradient_checkpointing": True}),
    ("Llama-3.2-1B", 4096, {}),
    ("Llama-3.2-1B", 32768, {"gradient_checkpointing": True}),
    ("Qwen3-30B-A3B", 16384, {"deepspeed": True, "gradient_checkpointing": True}),
]
OF_FOUR_LAYERS = [
    ("Qwen2.5-0.5B", 4096, {}),
    ("Qwen2.5-1.5B", 4096, {"way": "shared"}),
    ("Qwen2.5-7B", 32768, {}),
    ("Qwen2.5-7B", 16384, LORA),
    ("Qwen2.5-32B", 4096, {"deepspeed": True}),
    ("Qwen2.5-32B", 16384, {"gradient_checkpointing": True, **LORA}),
    ("window", 17000, {}),
    ("window", 17000, {"way": "padded"}),
    ("window", 17000, {"way": "shared"}),
    ("Qwen3-30B-A3B", 4096, {"deepspeed": True}),
    ("Qwen3-30B-A3B", 4096, {}),
    ("Qwen3-30B-A3B", 16384, {"gradient_checkpointing": True}),
    ("Qwen3-30B-A3B", 32768, {"deepspeed": True, "way": "shared"}),
]
QUICK = [
    ("Qwen2.5-0.5B", 16384, {"way": "padded"}),
    ("Qwen2.5-32B", 4096, {"layers": 4, "deepspeed": True}),
    ("window", 17000, {"layers": 4, "way": "shared"}),
    ("Qwen3-30B-A3B", 4096, {"layers": 4}),
]
"""Of layouts, backends and kinds of models, which the gate runs."""
ALL = WHOLE + [(name, tokens, {"layers": 4, **options}) for name, tokens, options in OF_FOUR_LAYERS]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL]


@pytest.mark.gate
@pytest.mark.parametrize(("name", "tokens", "options"), CASES, ids=str)
def test_the_plan_of_a_micro_batch_is_its_peak(name, tokens, options, tmp_path):
    planned, measured = compare(tmp_path, name, tokens, **options)
    assert planned == pytest.approx(measured, rel=0.05), (planned / 2**30, measured / 2**30)
