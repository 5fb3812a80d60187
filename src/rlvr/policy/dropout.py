"""Randomness of training mode: none but an adapter's dropout, and that only in the pass that has gradients.

Rollouts are sampled, ratios, KL and mismatch are computed without dropout, so training with the model's own would compare two
different distributions. TRL zeroes it too (`disable_dropout_in_model`). Training mode itself is needed by gradient
checkpointing, whose layers look at their flag `training`, and by an adapter's dropout. So the flag is set on these modules
alone: attention, embeddings and experts below them (dropout, LayerDrop, router noise) never see it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer


def training_modules(model: torch.nn.Module, adapter_dropout: bool) -> list[torch.nn.Module]:
    """Return the modules whose flag `training` an update sets: those that checkpoint, and the adapter's dropout if asked."""
    # the flag is Hugging Face's, which a module has or has not
    found = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    return found + (list(adapter_dropouts(model)) if adapter_dropout else [])


def adapter_dropouts(model: torch.nn.Module) -> Iterator[torch.nn.Dropout]:
    """Yield the dropout modules of peft's LoRA layers whose probability is above 0."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and ".lora_dropout." in name and module.p > 0:
            yield module


def disable_own_dropout(model: torch.nn.Module) -> None:
    """Set the probabilities of dropout and LayerDrop to 0 that modules which checkpoint apply themselves, by a function.

    Such modules keep them as numbers (OPT: `dropout`, `layerdrop`; Starcoder2: `embedding_dropout`) or read them from the
    configuration (Falcon); the latter get a copy of it, for the model's own is saved with the weights.
    """
    for module in training_modules(model, adapter_dropout=False):
        _zero(module)
        if isinstance(module, GradientCheckpointingLayer) and "config" in vars(module):
            config = copy.copy(module.config)
            _zero(config)
            module.config = config


def _zero(owner: Any) -> None:
    """Set every number in the attributes of `owner` to 0 whose name says that it is a probability of dropout."""
    for name, value in list(vars(owner).items()):
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)
