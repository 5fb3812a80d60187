"""Frozen weights in 4 bits under an adapter (QLoRA; Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes.

Invariant: what such a layer computes with is `dense` of its weight, in the type of its input; so copies of the weights
for engines and for files are the policy.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.policy.foreign import foreign


def quantizing(dtype: torch.dtype) -> Any:
    """Return transformers' configuration to load weights in 4 bits: NF4, its constants quantised again. ConfigError
    without bitsandbytes."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"model.quantization needs bitsandbytes: {install_command('bitsandbytes')}") from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        # NF4 and double quantisation are the settings of the QLoRA paper.
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def exact(model: Any) -> None:
    """Keep the layers from another product on CPUs with bfloat16 instructions, 0.02 off in a layer of width 64."""
    for module in model.modules():
        # A layer of bitsandbytes; its fast kernel repacks the weight, and what it multiplies with is then not `dense`.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(weight: Any) -> bool:
    """Return True if a parameter holds a weight in 4 bits."""
    return _state(weight) is not None


def _state(weight: Any) -> Any:
    """Return bitsandbytes' state of a weight in 4 bits (its shape, type and scales), None of a plain weight."""
    return foreign(weight, "quant_state")


def has_quantized(model: Any) -> bool:
    """Return True if any of a model's weights is in 4 bits."""
    return any(map(is_quantized, model.parameters()))


def dense(weight: torch.nn.Parameter) -> torch.Tensor:
    """The weight of a layer as it is multiplied with, detached; a plain one as it is."""
    if not is_quantized(weight):
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.detach(), _state(weight))


def dense_shape(weight: torch.nn.Parameter, plain: torch.Size) -> torch.Size:
    """The shape of `dense` of a weight, which is `plain` where the weight is not in 4 bits."""
    if is_quantized(weight):
        return torch.Size(_state(weight).shape)
    return plain


def dense_dtype(weight: torch.nn.Parameter) -> torch.dtype:
    """The type of `dense` of a weight."""
    if is_quantized(weight):
        return _state(weight).dtype
    return weight.dtype


def dense_model(model: Any) -> Any:
    """`model` with plain linear layers instead of those in 4 bits, in place."""
    # A list, because the tree is changed while it is walked.
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if is_quantized(foreign(child, "weight")):
                weight = dense(child.weight)
                plain = torch.nn.Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
                plain.weight = torch.nn.Parameter(weight, requires_grad=False)
                plain.bias = child.bias
                setattr(parent, name, plain)
    return model


def without_quantization(config: Any) -> Any:
    """A model's configuration, copied, for files with plain weights."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain
