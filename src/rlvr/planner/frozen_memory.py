"""Memory of frozen models, on the device of rank 0, which loads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from rlvr.config import FrozenModelConfig
from rlvr.planner.planned_devices import Devices
from rlvr.planner.shape import MemoryParts
from rlvr.policy.foreign import foreign
from rlvr.policy.frozen_model import LOGITS
from rlvr.policy.loading import located

# Counted from the forward passes of BERT's and Qwen3's layers in transformers 5.19, without gradients: the residual
# stream and its norm, queries, keys, values and their heads' outputs are at most 8 tensors of the model's width at
# once, the MLP 3 of its own. No measurement.
WIDTHS = 8
MLP_WIDTHS = 3
LOGIT_COPIES = 3
"""Float32 tensors of logits at once: themselves, their log-probs, and what the softmax makes."""


@dataclass(frozen=True)
class FrozenMemory:
    """Bytes of frozen models by part."""

    weights: MemoryParts = field(default_factory=dict)
    """At any time."""
    scoring: MemoryParts = field(default_factory=dict)
    """While responses are verified, which is while others are sampled: of the largest pass, since they take turns."""


def frozen_memory(models: dict[str, FrozenModelConfig], devices: Devices, ranks: int) -> FrozenMemory:
    """The memory that frozen models take of a device that is trained on.

    Not counted: models behind a server or on another device, and the keys and values of one that judges. Raises what
    transformers raises for a model that cannot be described.
    """
    weights = 0.0
    largest = 0.0
    for name, config in models.items():
        if config.path is None or not _is_here(config, devices, ranks):
            continue
        described = _described(name, config)
        with torch.device("meta"):
            model = AutoModel.from_config(described, trust_remote_code=config.trust_remote_code)
        text = described.get_text_config()
        width = 2 if config.dtype == "bfloat16" or (config.dtype == "auto" and devices.on_gpu) else 4
        count = sum(parameter.numel() for parameter in model.parameters())
        samples = any(one.endswith(("ForCausalLM", "LMHeadModel")) for one in foreign(described, "architectures") or ())
        if samples and not foreign(text, "tie_word_embeddings", True):
            count += int(text.vocab_size) * int(text.hidden_size)
        weights += width * count
        mlp = int(foreign(text, "intermediate_size", 0) or 4 * text.hidden_size)
        activations = width * config.batch_tokens * (WIDTHS * int(text.hidden_size) + MLP_WIDTHS * mlp)
        largest = max(largest, activations + (LOGIT_COPIES * 4 * LOGITS if samples else 0))
    if not weights:
        return FrozenMemory()
    return FrozenMemory({"frozen models": weights}, {"frozen models' passes": largest})


def _is_here(config: FrozenModelConfig, devices: Devices, ranks: int) -> bool:
    """Return True if the model lies on a device that is trained on."""
    if config.device == "auto":
        return True
    kind, _, index = config.device.partition(":")
    if not devices.on_gpu or kind != "cuda":
        return (kind == "cuda") == devices.on_gpu
    return int(index or 0) < ranks


def _described(name: str, config: FrozenModelConfig) -> Any:
    where, local = located(f"models.{name}.path", str(config.path))
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, "local_files_only": local}
    return AutoConfig.from_pretrained(where, **options)
