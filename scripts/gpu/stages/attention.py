"""Stage 2: forward and backward of one attention layer by length, in four ways and in the library's own, and the
constants of `rlvr.policy.attention_speed` that follow from them.

Heads are those of Qwen2.5-7B: 28 of queries, 4 of keys and values, 128 wide, in bfloat16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.policy import load_policy
from rlvr.policy.attention import Segments, attending, hook
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import kernel_for
from stages import family_layers
from stages.context import Context, SkipError
from stages.measuring import milliseconds, peak_memory
from stages.row_layouts import SHARED, compared, runs_of, shared_row

LONG = 16384
"""From this length on a call takes long enough to be timed three times only."""


@dataclass(frozen=True)
class Size:
    """The attention layer that is measured, and at which lengths."""

    heads: int
    kv_heads: int
    width: int
    lengths: tuple[int, ...]
    flex_lengths: tuple[int, ...]
    """flex_attention is compiled anew for each."""
    linear: tuple[int, int, int]
    """Tokens and both widths of the matrix product that attention is compared with: a feed-forward layer."""


GPU = Size(28, 4, 128, tuple(1024 << n for n in range(7)), (4096, 16384, 65536), (8192, 3584, 18944))
TOY = Size(4, 2, 16, (64, 128, 256), (64, 128), (64, 64, 128))


@dataclass
class Inputs:
    """Random queries, keys and values, [1, heads, N, width] each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def all(self) -> list[torch.Tensor]:
        """What is differentiated."""
        return [self.query, self.key, self.value]


Way = Callable[[Inputs], torch.Tensor]
"""Inputs -> outputs of any shape."""
Make = Callable[[Size, int, str], Way]
"""Size, length, device -> a way at that length."""


def run(context: Context) -> None:
    """Measure every way at every length, then fit the constants."""
    size = TOY if context.toy else GPU
    ways: dict[str, tuple[Make, tuple[int, ...], Callable[[int], int], int]] = {
        "sdpa causal": (sdpa_causal, size.lengths, triangle, 1),
        "sdpa mask": (sdpa_mask, size.lengths, triangle, 1),
        "varlen": (varlen, size.lengths, triangle, 1),
        "library packed": (partial(library, prefix=0.0), size.lengths, partial(pairs, prefix=0.0), 1),
        "library shared": (partial(library, prefix=SHARED), size.lengths, partial(pairs, prefix=SHARED), 2),
        "flex": (flex, size.flex_lengths, triangle, 1),
    }
    rate = context.measure("linear", linear, context, size)
    for dtype in ("bfloat16", "float32"):
        context.measure(f"layouts/{dtype}", compared, context, dtype, expected=2.0 if context.toy else 20.0)
    for length in (size.lengths[0], size.lengths[-1]):
        context.measure(f"parts/{length}", parts_of_a_row, context, size, length, expected=1.0)
    for name, (make, lengths, pairs_of, calls) in ways.items():
        times: dict[int, float] = {}
        for length in lengths:
            expected = 1.0 if length < LONG else 15.0
            found = context.measure(f"{name}/{length}", measured, context, size, make, length, expected=expected)
            if found is not None:
                times[pairs_of(length)] = found["ms"]
        if rate is not None and len(times) > 1:
            context.measure(f"constants of {name}", constants, size, times, rate["forward_flops_per_ms"], calls)
    family_layers.measure(context)


def linear(context: Context, size: Size) -> dict[str, float]:
    """The rate of a feed-forward layer, whose forward FLOPs are the unit of `Cost`; the time is of forward and
    backward."""
    tokens, narrow, wide = size.linear
    x = torch.randn(tokens, narrow, device=context.device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(wide, narrow, device=context.device, dtype=torch.bfloat16, requires_grad=True)
    output = torch.ones(tokens, wide, device=context.device, dtype=torch.bfloat16)
    ms = milliseconds(
        lambda: torch.autograd.grad(torch.nn.functional.linear(x, weight), [x, weight], output), context.device
    )
    flops = 2 * tokens * narrow * wide
    return {"ms": ms, "forward_flops_per_ms": flops / ms, "tflops": round(3 * flops / ms / 1e9, 3)}


def measured(context: Context, size: Size, make: Make, length: int) -> dict[str, Any]:
    """Milliseconds and peak memory of forward and backward at one length."""
    inputs = random_inputs(size, length, context.device)
    way = make(size, length, context.device)
    output = way(inputs)
    has_backward = output.requires_grad
    gradient = torch.ones_like(output)
    del output

    def both() -> None:
        output = way(inputs)
        if has_backward:
            torch.autograd.grad(output, inputs.all, gradient)

    ms = milliseconds(both, context.device, repeats=5 if length < LONG else 3)
    with peak_memory(context.device) as peak:
        both()
    return {"ms": ms, "peak_mib": peak.mib, "backward": has_backward}


def parts_of_a_row(context: Context, size: Size, length: int) -> dict[str, float]:
    """Milliseconds, forward and backward, of the parts of the layout `library shared`: the runs with themselves, with
    the prompt, and what merging and gathering add. At the shortest length it is what a call costs whatever its size."""
    spans = shared_row(length, SHARED, context.device)
    inputs = random_inputs(size, length, context.device)
    query, key, value = (x.detach()[0].transpose(0, 1).contiguous() for x in inputs.all)
    rule = ScoreRule(size.width**-0.5)
    found = {}
    for name, part in zip(("own", "prefix"), spans.segments(None), strict=True):
        queries, keys = int(part.query_length.sum()), int(part.key_length.sum())
        found[f"{name}_ms"] = milliseconds(
            partial(_one_call, query[:queries], key[:keys], value[:keys], part, rule), context.device
        )
    whole = measured(context, size, partial(library, prefix=SHARED), length)["ms"]
    return {**found, "whole_ms": whole, "merge_ms": whole - sum(found.values())}


def _one_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Segments, rule: ScoreRule) -> None:
    """One call's kernel forward and backward, without autograd."""
    kernel = kernel_for(query, value, part, rule)
    output, lse = kernel.forward(query, key, value, part, rule)
    kernel.backward(torch.ones_like(output), query, key, value, output, lse, part, rule)


def random_inputs(size: Size, length: int, device: str) -> Inputs:
    """Queries, keys and values of one row."""

    def one(heads: int) -> torch.Tensor:
        shape = (1, heads, length, size.width)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    return Inputs(one(size.heads), one(size.kv_heads), one(size.kv_heads))


def triangle(length: int) -> int:
    """Pairs of a query and a key of one causal run."""
    return length * (length + 1) // 2


def pairs(length: int, prefix: float) -> int:
    """Pairs that `Cost.packed` counts for such a row: each run with itself, causal, and with the prompt before it."""
    shared, runs = runs_of(length, prefix)
    return triangle(shared) + sum(triangle(own) + own * shared for own in runs)


def constants(size: Size, times: dict[int, float], rate: float, calls: int) -> dict[str, float]:
    """What `Cost` is to count for a pair and for a call: the fit of `ms = calls * call + pair * pairs` over `times`,
    pairs -> ms, of rows that take `calls` calls each: a run with itself, and each level of prompts before it.

    Its unit is the forward FLOP of a feed-forward layer; times are of forward and backward on both sides. `speed_*` are
    the constants of `AttentionSpeed`: a pair is 4 FLOPs for each channel.
    """
    counted = np.asarray(list(times), dtype=np.float64)
    ms = np.asarray(list(times.values()))
    slope, at_none = np.polyfit(counted, ms, 1, w=1 / ms)  # relative errors count alike at all lengths
    call = at_none / calls
    channels = size.heads * size.width
    per_pair = slope * rate / channels
    return {
        "flops_per_pair_and_channel": round(per_pair, 3),
        "flops_per_call": float(f"{call * rate:.3g}"),
        "speed_pair": round(per_pair / 4, 3),
        "speed_call": float(f"{call * rate:.3g}"),
    }


def layer(size: Size) -> Any:
    """What transformers' attention functions read of the module that calls them."""
    return SimpleNamespace(num_key_value_groups=size.heads // size.kv_heads, is_causal=True, training=False)


def sdpa_causal(size: Size, length: int, device: str) -> Way:
    """transformers' sdpa without a mask: flash attention on a GPU."""
    function, module = AttentionInterface()["sdpa"], layer(size)
    return lambda x: function(module, x.query, x.key, x.value, None)[0]


def sdpa_mask(size: Size, length: int, device: str) -> Way:
    """The same with a dense boolean mask, as shared prefixes and windows have it."""
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    function, module = AttentionInterface()["sdpa"], layer(size)
    return lambda x: function(module, x.query, x.key, x.value, mask)[0]


def library(size: Size, length: int, device: str, prefix: float) -> Way:
    """The library's own attention of such a row."""
    spans = shared_row(length, prefix, device)
    name = _hooked()
    with attending(spans):
        mask = AttentionMaskInterface()[name]()
    function, module = AttentionInterface()[name], layer(size)
    return lambda x: function(module, x.query, x.key, x.value, mask)[0]


@cache
def _hooked() -> str:
    """The name under which `hook` registers the library's attention by sdpa."""
    model = load_policy(ModelConfig(scratch=ScratchConfig(layers=1), device="cpu", attention="sdpa")).causal_lm
    hook(model)
    return str(model.config._attn_implementation)


def flex(size: Size, length: int, device: str) -> Way:
    """flex_attention with a causal block mask, compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    on_gpu = device == "cuda"

    def causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return q >= k

    mask = create_block_mask(causal, None, None, length, length, device, _compile=on_gpu)
    if on_gpu:
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda x: compiled(x.query, x.key, x.value, block_mask=mask, enable_gqa=True)
    # without gradients, which flex_attention does not have on a CPU
    return lambda x: flex_attention(*(one.detach() for one in x.all), block_mask=mask, enable_gqa=True)


def varlen(size: Size, length: int, device: str) -> Way:
    """torch's own flash attention of rows of any lengths: here one, causal."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise SkipError(f"torch {torch.__version__} has no torch.nn.attention.varlen") from error
    if device == "cpu":
        raise SkipError("torch.nn.attention.varlen has no CPU kernel")
    taken = inspect.signature(varlen_attn).parameters
    # causal is an argument of its own in torch 2.10, and a window without a right side in later versions
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in taken else {"window_size": (-1, 0)}
    repeats = size.heads // size.kv_heads
    if "enable_gqa" in taken:
        options["enable_gqa"] = True
        repeats = 1
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)

    def attend(x: Inputs) -> torch.Tensor:
        query, key, value = (one[0].transpose(0, 1) for one in x.all)
        if repeats > 1:
            key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        output = varlen_attn(query, key, value, bounds, bounds, length, length, **options)
        return output[0] if isinstance(output, tuple) else output

    return attend
