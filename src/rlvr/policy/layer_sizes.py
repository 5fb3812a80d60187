"""Sizes of a model's layers: windows, widths of heads, lengths beyond which padded rows have masks or scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlvr.policy.attention import PREFIX
from rlvr.policy.foreign import foreign

WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""A kind of layer -> the key of the configuration with the tokens that it sees."""


def attention_windows(config: Any) -> tuple[float, ...]:
    """For each attention layer, the tokens that a query sees at most; layers without attention have none."""
    sliding = foreign(config, "sliding_window")
    kinds = foreign(config, "layer_types")
    if kinds is None:  # one kind for all layers, as in Mistral
        layers = foreign(config, "num_hidden_layers", 1)
        kinds = ["sliding_attention" if sliding else "full_attention"] * layers
    seen = {"full_attention": None, **{kind: foreign(config, key) for kind, key in WINDOWS.items()}}
    return tuple(float(seen[kind] or math.inf) for kind in kinds if kind in seen)


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a model's layers, from which the time of a forward pass is estimated."""

    weights: int
    """Weights, without embedding and head."""
    channels: int
    """Channels of all heads of a layer; where values are narrower than keys, the mean of both."""
    windows: tuple[float, ...]
    """For each attention layer, the tokens that a query sees at most; inf: all"""
    masked_beyond: float = math.inf
    """Padded rows of more tokens have a tensor with queries along one dimension and keys along another: a mask for
    windows, or the scores. inf: none have"""
    one_rope_up_to: float = math.inf
    """Tokens beyond which a row gives all rows rotary angles of its length. inf: none does"""
    width: int = 0
    """Channels of the widest head, of queries, keys or values."""
    capped: bool = False
    """True: attention scores have a soft-cap."""

    @classmethod
    def of(cls, causal_lm: Any, device_type: str) -> LayerSizes:
        """Those of a model on this type of device. Of a weight that ZeRO-3 has partitioned the whole counts."""
        config = causal_lm.config.get_text_config()
        # Looked up and not multiplied; the head is counted apart, at trained tokens only.
        embedding = causal_lm.get_input_embeddings()
        head = causal_lm.get_output_embeddings()
        skipped = {id(module.weight) for module in (embedding, head) if module is not None}
        sizes = (foreign(p, "ds_numel", p.numel()) for p in causal_lm.parameters() if id(p) not in skipped)
        heads = foreign(config, "num_attention_heads", 1)
        keys, values = head_widths(config)
        windows = attention_windows(config)
        implementation = (foreign(config, "_attn_implementation") or "sdpa").removeprefix(PREFIX)
        beyond = masked_beyond(implementation, windows, device_type == "cpu" and keys != values)
        return cls(
            sum(sizes),
            heads * (keys + values) // 2,
            windows,
            beyond,
            one_rope_up_to(config),
            max(keys, values),
            foreign(config, "attn_logit_softcapping") is not None,
        )


def head_widths(config: Any) -> tuple[int, int]:
    """Channels of a head of queries and keys, and of one of values, by a text configuration.

    They differ in latent attention (DeepSeek V2 and V3), whose `head_dim` is the rotated part of a key.
    """
    heads = foreign(config, "num_attention_heads", 1)
    plain = int(foreign(config, "head_dim") or config.hidden_size // heads)
    parts = (foreign(config, "qk_nope_head_dim"), foreign(config, "qk_rope_head_dim"))
    keys = plain if None in parts else int(sum(parts))
    return keys, int(foreign(config, "v_head_dim") or plain)


def masked_beyond(implementation: str, windows: tuple[float, ...], scores: bool) -> float:
    """The length beyond which padded rows have masks or scores (`LayerSizes.masked_beyond`), by transformers' name of
    the attention.

    `scores`: sdpa computes all scores as one tensor, as on a CPU where values are not as wide as keys: its flash
    attention is for one width (torch, aten/native/transformers/sdp_utils_cpp.cpp).
    """
    # Soft-caps and sinks are computed by eager attention (or flash attention), all of whose scores are one tensor.
    if implementation == "eager" or (implementation == "sdpa" and scores):
        return 0.0
    # transformers makes masks for sdpa where rows are not shorter than a window.
    return min(windows, default=math.inf) if implementation == "sdpa" else math.inf


def one_rope_up_to(config: Any) -> float:
    """Tokens of the longest row up to which a model's rotary angles are those of a row alone, by its text
    configuration.

    transformers computes the angles of rope_type `dynamic` and `longrope` for the longest row of a pass
    (modeling_rope_utils.py: `dynamic_rope_update`).
    """
    rope = foreign(config, "rope_parameters") or {}
    # One for all layers, or one for each kind of layer.
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
    limits = [math.inf]
    for kind in kinds:
        name = kind.get("rope_type") or ""
        if "dynamic" in name:
            # Angles of a longer row stay for one of exactly this length, and are dropped for shorter ones.
            limits.append(config.max_position_embeddings - 1)
        elif name == "longrope":
            limits.append(kind["original_max_position_embeddings"])
    return min(limits)
