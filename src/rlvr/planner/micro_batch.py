"""The bytes that the forward and backward pass of one micro-batch take, beside weights, gradients and optimizer state.

What a layer keeps for the backward pass is counted on a model without storage (torch's meta device), on a few tokens, and grows
linearly with tokens; only eager attention's scores grow with their square.
"""

from __future__ import annotations

from typing import Any

import torch

from rlvr.config import ModelConfig
from rlvr.planner.shape import Shape
from rlvr.policy.loading import dtype_of

MIXED = 0.72
"""Share of the activations' float32 bytes that are left under bfloat16 autocast: 0.58 to 0.72 over Qwen2, Qwen3, Llama, Gemma 2
and 3, Mistral and Phi-3, whose norms stay in float32."""
CHUNK = 16 << 20
"""Bytes of logits that the LM head computes at once (rlvr.policy.statistics)."""
LOGITS_COPIES = 4
"""Temporaries of that size."""


def micro_batch_bytes(shape: Shape, model: ModelConfig, tokens: float, trained: float, length: int) -> dict[str, float]:
    """Bytes by part of one micro-batch's forward and backward pass, at their peak.

    `tokens`: of the micro-batch; `trained`: those of them that the loss is computed on; `length`: of its longest rollout.
    """
    computed_in_float32 = dtype_of(model) == torch.float32
    share = 1.0 if computed_in_float32 else MIXED
    layer = share * shape.kept / shape.layers
    if model.checkpoints_activations:
        # every layer keeps its input, in float32; the layer that is recomputed keeps the rest, and has gradients of that
        inputs = 0.0 if model.activation_offload else 4.0 * shape.layers * shape.hidden
        per_token = share * inputs + 2 * layer
        scores = 2 * shape.scores / shape.layers
    else:
        per_token = share * shape.kept
        scores = shape.scores
    return {
        # autocast copies the float32 weights that train, and keeps the copies to the end of the backward pass
        "weights in bfloat16": 0 if computed_in_float32 else 2 * shape.trained,
        # 8: the hidden states of trained tokens and their gradients, in float32
        "activations": tokens * (per_token + length * scores) + 8 * trained * shape.hidden,
        "logits": logits_bytes(shape, trained),
    }


def logits_bytes(shape: Shape, trained: float) -> float:
    """Bytes of the logits of so many tokens that are there at once."""
    return min(4 * trained * shape.vocabulary, CHUNK) * LOGITS_COPIES


def layer_bytes(shape: Shape, model: ModelConfig, tokens: float) -> float:
    """Bytes that one layer takes in a pass without gradients."""
    share = 1.0 if dtype_of(model) == torch.float32 else MIXED
    return share * shape.kept / shape.layers * tokens


def kept_per_token(model: Any, rows: int = 64, length: int = 2) -> float:
    """Bytes that the decoder of `model`, on the meta device, keeps for the backward pass in float32, for each token.

    Rows are short, so that attention's own quadratic part, which fused kernels do not keep, counts for little.
    """
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.zeros(rows, length, dtype=torch.long)
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool)  # ready made: making one would read values
    positions = torch.arange(length).expand(rows, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    del output
    return sum(storage.nbytes() for storage in kept.values()) / (rows * length)


def kept_scores(config: ModelConfig, text: Any) -> float:
    """Bytes of attention scores that eager attention keeps over all layers, for each pair of positions: a float32 for each
    head after the softmax and, with a soft-cap (Gemma 2), one after its tanh."""
    cap = getattr(text, "attn_logit_softcapping", None)
    if config.attention != "eager" and (config.attention is not None or cap is None):
        return 0.0
    return 4.0 * (1 if cap is None else 2) * int(text.num_attention_heads) * int(text.num_hidden_layers)
