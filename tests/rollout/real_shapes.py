"""Models of published shapes on the meta device: names, types and sizes of their weights without memory for them.

Configurations: config.json of the repositories named, as of 2025.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rlvr.policy import Policy


def _qwen2(hidden, layers, heads, intermediate, vocabulary=152064, tied=False, kv_heads=None):
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
    )


CONFIGS = {
    "Qwen/Qwen2.5-0.5B": lambda: _qwen2(896, 24, 14, 4864, 151936, True, 2),
    "Qwen/Qwen2.5-1.5B": lambda: _qwen2(1536, 28, 12, 8960, 151936, True, 2),
    "Qwen/Qwen2.5-7B": lambda: _qwen2(3584, 28, 28, 18944, kv_heads=4),
    "Qwen/Qwen2.5-32B": lambda: _qwen2(5120, 64, 40, 27648, kv_heads=8),
    "meta-llama/Llama-3.2-1B": lambda: LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
    ),
    "Qwen/Qwen3-30B-A3B": lambda: Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "openai/gpt-oss-20b": lambda: GptOssConfig(
        hidden_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_local_experts=32,
        num_experts_per_tok=4,
        vocab_size=201088,
    ),
}
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 0.494e9,
    "Qwen/Qwen2.5-1.5B": 1.544e9,
    "Qwen/Qwen2.5-7B": 7.616e9,
    "Qwen/Qwen2.5-32B": 32.76e9,
    "meta-llama/Llama-3.2-1B": 1.236e9,
    "Qwen/Qwen3-30B-A3B": 30.53e9,
    "openai/gpt-oss-20b": 20.9e9,
}
"""Parameters as the models' cards give them."""


def on_meta(name, tokenizer, dtype=torch.bfloat16):
    """The policy of a published shape, its float32 masters on the meta device, computed in `dtype`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    return Policy(model.eval(), tokenizer, dtype)
