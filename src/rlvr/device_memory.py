"""A GPU's memory handed between the trainer and an engine beside it."""

from __future__ import annotations

import gc

import torch


def free_cached(device: torch.device) -> None:
    """Give what torch's allocator keeps for later back to the driver, so that another process can take it."""
    if device.type == "cuda":
        gc.collect()  # tensors in reference cycles count as used
        torch.cuda.empty_cache()
