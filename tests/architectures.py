"""Tiny models of thirty architectures of transformers, with windows that cut."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.policy.loading import make_policy
from rlvr.policy.scratch import build_tokenizer

WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "mistral": WINDOW,
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "phi3": WINDOW,
    "phi": {},
    "gpt_neox": {},
    "gpt2": {},
    "starcoder2": WINDOW,
    "olmo2": {},
    "olmo3": WINDOW,
    "cohere": {},
    "cohere2": WINDOW,
    "granite": {
        "logits_scaling": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "smollm3": {},
    "exaone4": WINDOW,
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "mixtral": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {},
    "gemma": {},
    "stablelm": {},
    "hunyuan_v1_dense": {},
    "ministral": WINDOW,
    "seed_oss": {},
    "arcee": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


def policy_of(kind, more):
    """A tiny policy of three layers, whose windows are shorter than the rows."""
    tokenizer = build_tokenizer(ScratchConfig())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "initializer_range": 0.25}
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **{**sizes, **more})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return make_policy(model, tokenizer, ModelConfig(device="cpu"), 0)
