"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import Field

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.registry import register

# The ranges that torch's optimizers take: with annotations they are checked as the configuration is.
Beta = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]


@register("optimizer", "adamw")
def adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    betas: tuple[Beta, Beta] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019); the decay is for matrices only, not for norms and biases.

    torch's fused kernel where there is one: a step is one pass over the weights.
    """
    groups = _decaying(parameters, weight_decay)
    fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
    # lr 0: the backend sets the rate of each step before it steps.
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=fused)


@register("optimizer", "adamw_8bit")
def adamw_8bit(
    parameters: Iterable[torch.nn.Parameter],
    *,
    betas: tuple[Beta, Beta] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    weight_decay: NotNegative = 0.0,
    min_size: int = 4096,
) -> torch.optim.Optimizer:
    """AdamW with both moments in 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"), by
    bitsandbytes: 2 bytes of state for a weight instead of 8. Tensors of fewer than `min_size` weights keep float32.

    ConfigError where bitsandbytes is missing.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optim.optimizer adamw_8bit needs bitsandbytes: {install_command('bitsandbytes')}, or use adamw"
        ) from error
    groups = _decaying(parameters, weight_decay)
    return AdamW8bit(groups, lr=0.0, betas=betas, eps=eps, min_8bit_size=min_size)


def _decaying(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices with the decay, the rest without."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.ndim >= 2 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@register("optimizer", "sgd")
def sgd(parameters: Iterable[torch.nn.Parameter], *, momentum: NotNegative = 0.0) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=momentum)
