"""Activation offload: what a forward pass keeps for the backward pass waits in host memory.

Goes with gradient checkpointing, whose layers keep nothing but their inputs: these are what is copied, and no weight
is. Where gradients are off (sampling, a reference) nothing is kept and nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch


def offload_activations(decoder: torch.nn.Module) -> None:
    """From now on, forward passes of `decoder` keep their tensors in (pinned) host memory until the backward pass."""
    opened: list[Any] = []

    def begin(*_: Any) -> None:
        if torch.is_grad_enabled():
            # Pinned memory lets copies run beside the computation; it needs CUDA.
            opened.append(torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()))
            opened[-1].__enter__()

    def end(*_: Any) -> None:
        if torch.is_grad_enabled():
            opened.pop().__exit__(None, None, None)

    decoder.register_forward_pre_hook(begin)
    # Also after an exception: saved-tensor hooks that stay open would copy everything that comes later.
    decoder.register_forward_hook(end, always_call=True)
