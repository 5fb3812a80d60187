"""Optimizers by name, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from rlvr.config import OptimConfig
from rlvr.registry import register


@register("optimizer", "adamw")
def adamw(
    parameters: Iterable[torch.nn.Parameter],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019); the decay is for matrices only, not for norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.ndim >= 2 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps)


@register("optimizer", "sgd")
def sgd(parameters: Iterable[torch.nn.Parameter], *, momentum: float = 0.0) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=momentum)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (from 0) of a stage of `steps`: linear warm-up, then the schedule down to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
