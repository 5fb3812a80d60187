"""Tensors that the embedded engine makes while it reads long prompts: at real sizes, without contents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.planner.decoder_passes import to_cpu
from rlvr.policy.attention import tiles
from rlvr.policy.attention.kernels import kernels_of
from rlvr.policy.loading import make_policy
from rlvr.policy.scratch import build_tokenizer
from rlvr.rollout import decoder, decoder_parts
from rlvr.rollout.decoder import Steps
from rlvr.rollout.rows import CachePlan

PROMPTS = 2
LENGTH = 16411
"""A prime, above the widths of the models but for one, so that none is taken for tokens."""
# config.json of Qwen/Qwen2.5-0.5B, meta-llama/Llama-3.2-1B, mistralai/Mistral-7B-v0.1 and
# microsoft/Phi-3-mini-4k-instruct on the Hugging Face hub, as far as it decides the sizes of a layer; three layers of
# each.
MODELS = {
    "qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "phi3": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
        "pad_token_id": 0,
    },
}


def of_tokens(size):
    """Whether a dimension counts tokens of a prompt, or of both; kernels may pad it."""
    return LENGTH <= size <= LENGTH + 64 or size % LENGTH == 0


class PairsOfTokens(TorchDispatchMode):
    """Operations that give a tensor with two dimensions of tokens, or one of their pairs."""

    def __init__(self):
        super().__init__()
        self.found = set()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("aten::"):
            with self:  # in inference mode composite operations come whole
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
            if sum(map(of_tokens, shape)) > 1 or any(size >= LENGTH**2 for size in shape):
                self.found.add(f"{func} {tuple(shape)}")
        return result


def test_a_mask_is_found():
    with FakeTensorMode(), PairsOfTokens() as made:
        every = torch.arange(LENGTH)
        assert not made.found
        _ = (every[:, None] >= every)[None]
    assert len(made.found) == 2


def fake_steps(kind, monkeypatch, dtype):
    described = AutoConfig.for_model(
        kind, **MODELS[kind], num_hidden_layers=3, vocab_size=4096, max_position_embeddings=1 << 17
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, dtype=torch.float32)
        policy = make_policy(model, build_tokenizer(ScratchConfig()), ModelConfig(dtype="bfloat16", device="cpu"))
    to_cpu(policy.model)
    policy.dtype = dtype
    policy.head_is_enough = True  # tried on values, of which there are none
    monkeypatch.setattr(decoder_parts, "_rms_form", lambda module: (module.variance_epsilon, 0.0))
    steps = Steps(policy)
    with torch.inference_mode():
        steps.refresh()
    return steps


@pytest.mark.parametrize(
    ("device", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float32)]
)
@pytest.mark.parametrize(
    "kind",
    # A window on a CPU is computed in tiles: 15 s a case.
    [pytest.param(kind, marks=pytest.mark.slow if kind == "phi3" else ()) for kind in MODELS],
)
def test_no_tensor_of_a_prefill_has_two_dimensions_of_tokens(kind, device, dtype, monkeypatch):
    # Larger than they are, for fewer of them.
    monkeypatch.setattr(tiles, "QUERIES", 2048)
    monkeypatch.setattr(tiles, "CPU_KEYS", 2048)
    monkeypatch.setattr(decoder, "has_flash", lambda _: device == "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of(device):
        steps = fake_steps(kind, monkeypatch, dtype)
        assert (steps.window < LENGTH) == ("sliding_window" in MODELS[kind])
        cache = steps.cache(CachePlan(PROMPTS, LENGTH + 8), LENGTH + 8)
        with torch.inference_mode(), PairsOfTokens() as made:
            ids = torch.zeros(PROMPTS, LENGTH, dtype=torch.int64)
            last = torch.full((PROMPTS,), LENGTH - 1)
            logits = steps.read(cache, ids, last, torch.from_numpy(np.arange(PROMPTS)))
    assert logits.shape == (PROMPTS, 4096)
    assert made.operations > 3 * 12
    assert not made.found
