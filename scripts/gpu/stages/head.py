"""Stage 3: log-probs and entropies from hidden states and the LM head, forward and backward: the fused head with its
Triton kernels and by operations of torch, beside whole logits.

Widths are those of Qwen2.5-0.5B and 7B, with their vocabulary, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlvr.policy import fused_head
from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.model import Head
from stages.context import Context
from stages.measuring import milliseconds, peak_memory

SIZES = [(width, tokens, 151936) for tokens in (4096, 16384) for width in (896, 3584)]
"""Width, trained tokens, vocabulary."""
TOY = [(16, 32, 5000), (16, 1024, 5000)]
"""One that is kept in one tile, and one that is not."""

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states [T, H], weights [V, H], token ids [T], temperatures [T]."""


def run(context: Context) -> None:
    """Measure both ways at every size, the library's first."""
    for name, way in (("fused", fused), ("fused without triton", without_triton), ("whole logits", whole)):
        for width, tokens, vocabulary in TOY if context.toy else SIZES:
            key = f"{name}/H{width} T{tokens}"
            context.measure(
                key, measured, context, way, width, tokens, vocabulary, expected=1.0 if context.toy else 10.0
            )


def measured(
    context: Context, way: Callable[[Problem], torch.Tensor], width: int, tokens: int, vocabulary: int
) -> dict[str, Any]:
    """Milliseconds, peak memory beyond the gradients, and kernels of forward and backward."""
    inputs = problem(context.device, width, tokens, vocabulary)
    slopes = torch.linspace(-1, 1, tokens, device=context.device)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(way(inputs), inputs[:2], slopes)

    ms = milliseconds(both, context.device, repeats=3)
    with peak_memory(context.device) as peak:
        gradients = both()
    kept = sum(g.nbytes for g in gradients) / 2**20
    del gradients
    return {
        "ms": ms,
        "peak_mib": None if peak.mib is None else round(peak.mib - kept, 1),
        "gradients_mib": round(kept, 1),
        "tflops": round(6 * tokens * vocabulary * width / ms / 1e9, 3),
        "operations": operations(both),
        "kernel_launches": launches(both) if context.device == "cuda" else None,
    }


def problem(device: str, width: int, tokens: int, vocabulary: int) -> Problem:
    """Random hidden states, and float32 weights as they are trained."""
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=device), torch.ones(tokens, device=device)


def fused(inputs: Problem) -> torch.Tensor:
    """The library's: log-probs [T] with a gradient, and entropies without."""
    hidden, weight, ids, temperature = inputs
    asked = {"logprobs": True, "entropy": False}
    return fused_statistics(Head((hidden,), (weight,)), temperature, asked, ids)["logprobs"]


def without_triton(inputs: Problem) -> torch.Tensor:
    """The library's by operations of torch; the backward pass takes what the forward pass took."""
    with mock.patch.object(fused_head, "triton_kernels", return_value=None):
        return fused(inputs)


def whole(inputs: Problem) -> torch.Tensor:
    """The same from the matrix of all logits [T, V]."""
    hidden, weight, ids, temperature = inputs
    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype)).float() / temperature[:, None]
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[:, None])[:, 0]


class _Count(TorchDispatchMode):
    """Counts the operations of torch that compute: views and reads of shapes are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def operations(function: Callable[[], Any]) -> int:
    """Operations that a call dispatches, the same number on every device."""
    with _Count() as counted:
        function()
    return counted.count


def launches(function: Callable[[], Any]) -> int:
    """Kernels that a call launches on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if "LaunchKernel" in event.key)
