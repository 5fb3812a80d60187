"""The parts of a model of the Llama family, found among its modules. UnfitError where one is not of the known form."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from rlvr.policy import Policy
from rlvr.policy.attention import PREFIX

# `rope_type` of transformers (modeling_rope_utils.py). "dynamic" and "longrope" change their angles with the length,
# for which one table would be wrong.
_FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position only."""
# Names of submodules in transformers' models of the Llama family (Phi-3 has qkv_proj and gate_up_proj). A block with
# any other part, such as a second norm or a router, is not this arithmetic.
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "qkv_proj"}
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


class UnfitError(Exception):
    """Why a model is decoded by its own modules."""


@dataclass(frozen=True)
class NormPart:
    """A norm; `epsilon` where it is a plain RMS norm, None where it is something else."""

    module: Any
    epsilon: float | None


@dataclass(frozen=True)
class BlockParts:
    """The modules of one decoder layer, and its sizes."""

    queries: list[Any]
    """Linear modules whose outputs, side by side, are queries, keys and values."""
    gates: list[Any]
    """Those of gate and up projection."""
    out: Any
    down: Any
    first_norm: NormPart
    second_norm: NormPart
    head_norms: list[NormPart]
    """Of queries and keys; empty where there are none."""
    activation: Any
    size: int
    """D, the size of a head."""
    heads: int
    """Heads of queries."""
    shared: int
    """Heads of keys, and of values."""
    scale: float
    """Factor of the scores."""


@dataclass(frozen=True)
class ModelParts:
    """The modules of a model."""

    embed: Any
    rotary: Any
    blocks: list[BlockParts]
    windows: list[int | None]
    """The sliding window of each block."""
    norm: NormPart
    head: Any


def model_parts(policy: Policy) -> ModelParts:
    """The parts of a policy's model."""
    model = policy.causal_lm.base_model
    config = policy.causal_lm.config.get_text_config()
    if policy.dtype == torch.float32 and policy.causal_lm.get_input_embeddings().weight.dtype != torch.float32:
        raise UnfitError("its weights are not in float32, which it computes in")
    if not policy.head_is_enough:
        raise UnfitError("its logits are more than its LM head's")
    if (kind := (config._attn_implementation or "sdpa").removeprefix(PREFIX)) not in ("sdpa", "eager"):
        raise UnfitError(f"its attention is {kind}")
    rotary = getattr(model, "rotary_emb", None)
    kind_of_rotary = getattr(rotary, "rope_type", None)
    if isinstance(kind_of_rotary, dict):
        raise UnfitError("its rotary embedding differs by kind of layer")
    if kind_of_rotary not in _FIXED_ROTARY:
        raise UnfitError("it has no rotary embedding, or one that changes with the length")
    if not all(hasattr(model, name) for name in ("layers", "norm")):
        raise UnfitError("it has no list of layers with a norm after them")
    return ModelParts(
        policy.causal_lm.get_input_embeddings(),
        rotary,
        [block_parts(layer) for layer in model.layers[: config.num_hidden_layers]],
        _windows(config),
        norm_part(model.norm),
        policy.causal_lm.get_output_embeddings(),
    )


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer by the model's configuration, None for a layer without one."""
    window = getattr(config, "sliding_window", None)
    # Without types all layers are alike: Mistral and Phi-3 have a window in all of them.
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types[: config.num_hidden_layers]]


def block_parts(layer: Any) -> BlockParts:
    """The parts of one decoder layer."""
    for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
        if not hasattr(layer, name):
            raise UnfitError(f"{type(layer).__name__} has no {name}")
    attention = layer.self_attn
    mlp = layer.mlp
    for module, supported in ((layer, _LAYER), (attention, _ATTENTION), (mlp, _MLP)):
        names = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
        if not names <= supported:
            raise UnfitError(
                f"{type(module).__name__} has parts that are not supported here: {', '.join(sorted(names - supported))}"
            )
    queries = [m for name in ("q_proj", "k_proj", "v_proj", "qkv_proj") if (m := getattr(attention, name, None))]
    if not any(hasattr(mlp, name) for name in ("gate_proj", "gate_up_proj")):
        raise UnfitError(f"{type(mlp).__name__} has no gate")
    gates = [m for name in ("gate_proj", "up_proj", "gate_up_proj") if (m := getattr(mlp, name, None))]
    head_norms = [norm_part(m) for name in ("q_norm", "k_norm") if (m := getattr(attention, name, None))]
    if len(head_norms) == 1:
        raise UnfitError("it has a norm for the queries only, or for the keys only")
    activation = getattr(mlp, "act_fn", None) or mlp.activation_fn
    if type(activation) in (nn.SiLU, SiLUActivation):
        activation = nn.functional.silu
    size = int(attention.head_dim)
    # Query heads from the output projection, the rest of the joined projection is keys and values in equal parts; so it
    # holds for separate and for fused (qkv_proj) layers, and for grouped queries.
    heads = attention.o_proj.in_features // size
    return BlockParts(
        queries,
        gates,
        attention.o_proj,
        mlp.down_proj,
        norm_part(layer.input_layernorm),
        norm_part(layer.post_attention_layernorm),
        head_norms,
        activation,
        size,
        heads,
        shared=(sum(m.out_features for m in queries) // size - heads) // 2,
        scale=float(attention.scaling),
    )


def norm_part(module: Any) -> NormPart:
    """A norm, with its epsilon if a trial shows that it is a plain RMS norm."""
    return NormPart(module, _rms_epsilon(module))


def _rms_epsilon(module: Any) -> float | None:
    """The epsilon of a module that is x / sqrt(mean(x^2) + epsilon) x weight; None where it is something else."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    trial = copy.deepcopy(module).float()
    weight = trial.weight
    generator = torch.Generator(weight.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=weight.device, dtype=weight.dtype)

    with torch.no_grad():
        trial.weight.copy_(normal(*weight.shape))
        # A module that adds 1 to its weight (Gemma) or subtracts the mean (LayerNorm has a bias too) fails this trial
        # and is called as it is.
        sizes = weight.new_tensor([1e-3, 0.1, 1.0, 10.0])[:, None]  # epsilon shows in small ones
        x = sizes * normal(4, *weight.shape)
        ours = x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * trial.weight
        if torch.allclose(trial(x), ours, rtol=1e-5, atol=1e-6):
            return epsilon
        return None
