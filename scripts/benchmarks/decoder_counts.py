"""Counts of a decoder's forward and backward pass: the library's own policy and micro-batch, on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from dispatch_counts import Counting, Counts
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.planner.decoder_passes import to_cpu
from rlvr.policy import Policy
from rlvr.policy.attention import Spans
from rlvr.policy.attention.kernels import kernels_of
from rlvr.policy.attention.packed_rows import hook
from rlvr.policy.flops import ModelFlops
from rlvr.policy.loading import make_policy
from rlvr.policy.microbatch import ComputedPass
from rlvr.policy.scratch import build_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
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


@dataclass(frozen=True)
class DecoderCounts:
    """Forward and backward pass of a decoder over a micro-batch."""

    executed: Counts
    needed: float
    """FLOPs that MFU counts (rlvr.policy.flops), without the head."""


def flash(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
          scale: Any = None, enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
    """scaled_dot_product_attention by the operator that torch takes on a GPU in bfloat16 without a mask."""
    assert attn_mask is None
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    return operator(query, key, value, dropout_p, is_causal, scale=scale)[0]


def fake_policy(model: str, layers: int | None = None) -> Policy:
    """A policy whose weights have shapes only, in bfloat16; `layers`: of its layers the first ones, None: all."""
    config = ModelConfig(dtype="bfloat16", device="cpu", gradient_checkpointing=False)
    with torch.device("meta"):
        described = AutoConfig.for_model(**MODELS[model] | ({} if layers is None else {"num_hidden_layers": layers}))
        causal_lm = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
        policy = make_policy(causal_lm, build_tokenizer(ScratchConfig()), config)
    # make_policy keeps what trains in float32; here weights are what an engine of sharded weights computes with.
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    to_cpu(policy.model)
    return policy


def decoder_counts(model: str, rollouts: int, prompt: int, response: int) -> DecoderCounts:
    """The counts of `rollouts` rows of prompt and response, one beside the other."""
    length = prompt + response
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", flash),
        # It reads values; for rows that are not packed it gives None.
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
    ):
        policy = fake_policy(model)
        ids = torch.zeros(rollouts, length, dtype=torch.int64)
        positions = torch.arange(length).expand(rollouts, -1)
        with policy.training(), Counting() as mode:
            hidden = policy.hidden_states(ids, positions)
            hidden.backward(torch.empty_like(hidden))
        rows = np.full(rollouts, length)
        computed = ComputedPass(length=rows, context=np.zeros_like(rows), projected=0, grad=True)
        needed = ModelFlops.of(policy).of_pass(computed)
    return DecoderCounts(mode.counts, needed)


def packed_counts(model: str, rollouts: int, prompt: int, response: int, shared: bool) -> Counts:
    """The counts of the same rollouts in one packed row, by the calls of a GPU; `shared`: the prompt stands once."""
    if shared:
        lengths = [prompt] + rollouts * [response]
        contexts = [-1] + rollouts * [0]
    else:
        lengths = rollouts * [prompt + response]
        contexts = rollouts * [-1]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        kernels_of("cuda"),
    ):
        policy = fake_policy(model)
        hook(policy.causal_lm)
        spans = Spans(np.asarray(lengths), np.asarray(contexts), torch.device("cpu"))
        # Indices on the device are made once for each row, not in each layer.
        for segments in spans.segments(None):
            _ = segments.varlen
        ids = torch.zeros(1, sum(lengths), dtype=torch.int64)
        positions = torch.arange(sum(lengths))[None]
        with policy.training(), Counting() as mode:
            hidden = policy.hidden_states(ids, positions, spans)
            hidden.backward(torch.empty_like(hidden))
    return mode.counts
