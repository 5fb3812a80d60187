"""The memory planner of the library, called in one place."""

from __future__ import annotations

from typing import Any

import torch

from rlvr.config import ModelConfig
from rlvr.planner import STATE, micro_batch_bytes, shape_of


def planned_parts(model: dict[str, Any], tokens: int, trained: int, length: int) -> dict[str, float]:
    """MiB by part of an update under the plain backend with AdamW, for the `model` section of a configuration.

    `tokens`: of its one micro-batch, a shared prefix once; `trained`: those of them that the loss is computed on;
    `length`: of each rollout. What torch's allocator does not hand out (the program, the GPU's context) is left out.
    """
    config = ModelConfig(**model)
    shape = shape_of(config)
    gpu_memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    found = {
        "weights": shape.weights,
        "gradients": 4 * shape.trained,  # float32, like the weights that train
        "optimizer": STATE["adamw"] * shape.trained,
        **micro_batch_bytes(shape, config, tokens, trained, length, gpu_memory=gpu_memory),
    }
    return {name: round(size / 2**20, 1) for name, size in found.items()}
