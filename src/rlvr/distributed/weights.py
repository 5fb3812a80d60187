"""Named weights in buckets, as engines take them.

Invariants: names are those of the plain Hugging Face model; LoRA updates are merged into what is sent; a tied LM head is
sent under its own name too, because an engine may keep it apart from the embedding; one bucket at a time is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlvr.policy import Policy
from rlvr.rollout.engine import Bucket

BUCKET_BYTES = 256 << 20


def named_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the policy by its Hugging Face name, adapters merged; tied weights under each of their names."""
    model = policy.causal_lm
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if (module := adapted.get(owner.removesuffix(".base_layer"))) is not None:
            yield f"{owner.removesuffix('.base_layer')}.{leaf}", _merged(module, leaf, parameter)
        elif not any(owner.startswith(f"{prefix}.") for prefix in adapted):
            yield name, parameter.detach()
        # else lora_A, lora_B ... of an adapted module, which went into its merged weight


def _merged(module: Any, leaf: str, parameter: torch.Tensor) -> torch.Tensor:
    if leaf != "weight":
        return parameter.detach()
    with torch.no_grad():
        delta = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
        return parameter.detach() + delta


def buckets(weights: Iterator[tuple[str, torch.Tensor]], size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """`weights` in lists of at most `size` bytes (a larger tensor alone)."""
    bucket: Bucket = []
    used = 0
    for name, tensor in weights:
        if bucket and used + tensor.nbytes > size:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += tensor.nbytes
    if bucket:
        yield bucket
