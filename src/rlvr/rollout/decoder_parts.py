"""The parts of a model of a known form, found among its modules. UnfitError where one is not of the known form."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from rlvr.policy import Policy
from rlvr.policy.attention import PREFIX
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.packed_rows import EXACT
from rlvr.policy.foreign import foreign

# `rope_type` of transformers (modeling_rope_utils.py). "dynamic" and "longrope" change their angles with the length,
# for which one table would be wrong.
_FIXED_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position only."""
# Names of submodules in transformers' models of the Llama family (Phi-3 has qkv_proj and gate_up_proj, Phi dense,
# Hunyuan norms after the rotation). Attention with any other part is not this arithmetic.
_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "dense"}
_NORMS_BEFORE = ("q_norm", "k_norm")
_NORMS_AFTER = ("query_layernorm", "key_layernorm")
_FEED_FORWARD = ("mlp", "block_sparse_moe")
_GATED = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


class UnfitError(Exception):
    """Why a model is decoded by its own modules."""


@dataclass(frozen=True)
class NormPart:
    """A norm; `epsilon` where it is an RMS norm, None where it is something else."""

    module: Any
    epsilon: float | None
    offset: float = 0.0
    """Added to the weight (Gemma: 1)."""


@dataclass(frozen=True)
class BlockNorms:
    """The norms of a block, each None where there is none."""

    before_attention: Any
    after_attention: Any
    """Of what attention gives, before it is added."""
    before_feed_forward: Any
    after_feed_forward: Any

    @property
    def parallel(self) -> bool:
        """True if the feed-forward part takes what attention takes, normed once (Cohere, Phi)."""
        return self.before_feed_forward is None and self.after_feed_forward is None


# Names of the norms of a layer in transformers' models: the parts of a block in the order of `BlockNorms`.
_BLOCK_NORMS = (
    # Llama, Qwen, Mistral, mixtures, Granite, gpt-oss
    BlockNorms("input_layernorm", None, "post_attention_layernorm", None),
    # Gemma 2 and 3
    BlockNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    # GLM-4
    BlockNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # OLMo 2 and 3, EXAONE 4
    BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    # VaultGemma
    BlockNorms("input_layernorm", None, "pre_feedforward_layernorm", None),
    # Apertus
    BlockNorms("attention_layernorm", None, "feedforward_layernorm", None),
    # Cohere, Phi
    BlockNorms("input_layernorm", None, None, None),
)


@dataclass(frozen=True)
class FeedForwardParts:
    """A feed-forward part: W_down (act(W_gate x) * W_up x), or a module of any form."""

    module: Any
    gates: list[Any]
    """Gate and up projection, as one module or two; empty where the module is of another form."""
    down: Any = None
    activation: Any = None


@dataclass(frozen=True)
class BlockParts:
    """The modules of one decoder layer, and its sizes."""

    queries: list[Any]
    """Linear modules whose outputs, side by side, are queries, keys and values."""
    out: Any
    feed_forward: FeedForwardParts
    norms: BlockNorms
    """Each of its members a `NormPart`, or None"""
    head_norms: list[NormPart]
    """Of queries and keys; empty where there are none."""
    norms_after_rotation: bool
    norms_of_all_heads: bool
    """True: of the channels of all heads together (OLMo 2)"""
    size: int
    """D, the size of a head."""
    heads: int
    """Heads of queries."""
    shared: int
    """Heads of keys, and of values."""
    scoring: ScoreRule
    sinks: Any
    """The parameter with a score for each head that has no value (gpt-oss), None without one."""
    multiplier: float
    """Factor of what a block adds to its input (Granite)."""


@dataclass(frozen=True)
class ModelParts:
    """The modules of a model."""

    embed: Any
    multiplier: float
    """Factor of the embedding, which its module leaves out (Granite)."""
    rotary: Any
    blocks: list[BlockParts]
    windows: list[int | None]
    """The sliding window of each block."""
    layer_types: list[str | None]
    """Of each block, the type by which its rotary angles are chosen; None where all have the same."""
    norm: NormPart
    head: Any
    exact: bool
    """True if the model's attention function computes soft-caps and sinks."""


def model_parts(policy: Policy) -> ModelParts:
    """The parts of a policy's model."""
    model = policy.causal_lm.base_model
    config = policy.causal_lm.config.get_text_config()
    if policy.dtype == torch.float32 and policy.causal_lm.get_input_embeddings().weight.dtype != torch.float32:
        raise UnfitError("its weights are not in float32, which it computes in")
    if not policy.head_is_enough:
        raise UnfitError("its logits are more than its LM head's")
    kind = (config._attn_implementation or "sdpa").removeprefix(PREFIX)
    if kind not in ("sdpa", "eager"):
        raise UnfitError(f"its attention is {kind}")
    rotary = foreign(model, "rotary_emb")
    kinds_of_rotary = foreign(rotary, "rope_type")
    by_type = isinstance(kinds_of_rotary, dict)
    if not set(kinds_of_rotary.values() if by_type else [kinds_of_rotary]) <= _FIXED_ROTARY:
        raise UnfitError("it has no rotary embedding, or one that changes with the length")
    norm = foreign(model, "norm", foreign(model, "final_layernorm"))
    if norm is None or not hasattr(model, "layers"):
        raise UnfitError("it has no list of layers with a norm after them")
    count = config.num_hidden_layers
    return ModelParts(
        policy.causal_lm.get_input_embeddings(),
        float(foreign(model, "embedding_multiplier", 1.0)),
        rotary,
        [block_parts(layer, kind in EXACT) for layer in model.layers[:count]],
        _windows(config),
        list(config.layer_types[:count]) if by_type else [None] * count,
        norm_part(norm),
        policy.causal_lm.get_output_embeddings(),
        kind in EXACT,
    )


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer by the model's configuration, None for a layer without one."""
    window = foreign(config, "sliding_window")
    # Without types all layers are alike: Mistral and Phi-3 have a window in all of them.
    types = foreign(config, "layer_types") or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types[: config.num_hidden_layers]]


def block_parts(layer: Any, exact: bool) -> BlockParts:
    """The parts of one decoder layer. `exact`: its attention function computes soft-caps and sinks."""
    mlp = feed_forward_of(layer)
    attention = foreign(layer, "self_attn")
    if attention is None or mlp is None:
        raise UnfitError(f"{type(layer).__name__} has no self_attn, or no {' or '.join(_FEED_FORWARD)}")
    norms = (*_NORMS_BEFORE, *_NORMS_AFTER)
    if others := _children(attention) - {*_ATTENTION, *norms}:
        raise UnfitError(f"{type(attention).__name__} has parts that are not supported here: {_listed(others)}")
    queries = [m for name in ("q_proj", "k_proj", "v_proj", "qkv_proj") if (m := foreign(attention, name))]
    head_norms = [norm_part(m) for name in norms if (m := foreign(attention, name))]
    if len(head_norms) not in (0, 2):
        raise UnfitError("it has a norm for the queries only, or for the keys only")
    size = int(attention.head_dim)
    # Query heads from the output projection, the rest of the joined projection is keys and values in equal parts; so it
    # holds for separate and for fused (qkv_proj) layers, and for grouped queries.
    out = foreign(attention, "o_proj", foreign(attention, "dense"))
    if out is None or not queries:
        raise UnfitError(f"{type(attention).__name__} has no projections that are known")
    heads = out.in_features // size
    return BlockParts(
        queries,
        out,
        _feed_forward_parts(mlp),
        _block_norms(layer),
        head_norms,
        norms_after_rotation=foreign(attention, _NORMS_AFTER[0]) is not None,
        norms_of_all_heads=any(_channels(norm.module) > size for norm in head_norms),
        size=size,
        heads=heads,
        shared=(sum(m.out_features for m in queries) // size - heads) // 2,
        scoring=ScoreRule(float(attention.scaling), foreign(attention, "attn_logit_softcapping") if exact else None),
        sinks=foreign(attention, "sinks") if exact else None,
        multiplier=float(foreign(layer, "residual_multiplier", 1.0)),
    )


def feed_forward_of(layer: Any) -> Any:
    """The feed-forward module of a layer, None without one of a known name."""
    return next((m for name in _FEED_FORWARD if (m := foreign(layer, name)) is not None), None)


def _channels(norm: Any) -> int:
    """Channels that a norm has weights for; 0 where it has none."""
    weight = foreign(norm, "weight")
    return 0 if weight is None else int(weight.shape[-1])


def _children(module: Any) -> set[str]:
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _block_norms(layer: Any) -> BlockNorms:
    """The norms of a layer, by their names."""
    there = _children(layer) - {"self_attn", *_FEED_FORWARD}
    for names in _BLOCK_NORMS:
        if there == {name for name in vars(names).values() if name is not None}:
            parts = {part: name and norm_part(layer.get_submodule(name)) for part, name in vars(names).items()}
            return BlockNorms(**parts)
    raise UnfitError(f"{type(layer).__name__} has parts that are not supported here: {_listed(there)}")


def _feed_forward_parts(mlp: Any) -> FeedForwardParts:
    """The parts of a gated feed-forward module; of another one, the module."""
    gates = [m for name in ("gate_proj", "up_proj", "gate_up_proj") if (m := foreign(mlp, name))]
    gated = len(gates) == (1 if hasattr(mlp, "gate_up_proj") else 2)
    if not gated or not _children(mlp) <= _GATED or not all(isinstance(m, nn.Module) for m in gates):
        return FeedForwardParts(mlp, [])
    activation = foreign(mlp, "act_fn") or mlp.activation_fn
    if type(activation) in (nn.SiLU, SiLUActivation):
        activation = nn.functional.silu
    return FeedForwardParts(mlp, gates, mlp.down_proj, activation)


def norm_part(module: Any) -> NormPart:
    """A norm, with its epsilon if a trial shows that it is an RMS norm."""
    return NormPart(module, *(_rms_form(module) or (None,)))


def _rms_form(module: Any) -> tuple[float, float] | None:
    """(epsilon, offset) of a module that is x / sqrt(mean(x^2) + epsilon) x (offset + weight), offset 0 or 1; None
    where it is something else."""
    epsilon = foreign(module, "variance_epsilon", foreign(module, "eps"))
    if not isinstance(epsilon, float) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    if module.weight.ndim != 1:
        return None
    trial = copy.deepcopy(module).float()
    weight = trial.weight
    generator = torch.Generator(weight.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=weight.device, dtype=weight.dtype)

    with torch.no_grad():
        trial.weight.copy_(normal(*weight.shape))
        # A module that subtracts the mean (LayerNorm has a bias too) fails this trial and is called as it is.
        sizes = weight.new_tensor([1e-3, 0.1, 1.0, 10.0])[:, None]  # epsilon shows in small ones
        x = sizes * normal(4, *weight.shape)
        theirs = trial(x)
        normed = x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
        for offset in (0.0, 1.0):
            if torch.allclose(theirs, normed * (offset + trial.weight), rtol=1e-5, atol=1e-6):
                return epsilon, offset
        return None
