"""Attention layers of families with sliding windows, soft-caps and sinks, in packed rows with and without a shared
prompt: their error against dense scores in float64, and their time and memory in long rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rlvr.policy.attention import Spans
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import kernel_for
from rlvr.policy.attention.merged import attend
from stages.context import Context
from stages.measuring import milliseconds, peak_memory
from stages.row_layouts import SHARED, uneven_row


@dataclass(frozen=True)
class Layer:
    """One attention layer of a family."""

    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    """Tokens that a token sees at most, itself among them; None: all"""
    softcap: float | None = None
    sinks: bool = False
    """True: each head has a score without a value"""

    def toy(self) -> Layer:
        """The same rules at the size of a test."""
        return dataclasses.replace(self, heads=4, kv_heads=2, width=16, window=self.window and 5)


LAYERS = {
    "Mistral-7B window": Layer(32, 8, 128, window=4096),
    "Gemma-2-9B": Layer(16, 8, 256, softcap=50.0),
    "Gemma-2-9B window": Layer(16, 8, 256, softcap=50.0, window=4096),
    "gpt-oss-20b": Layer(64, 8, 64, sinks=True),
    "gpt-oss-20b window": Layer(64, 8, 64, sinks=True, window=128),
}
"""As in the config.json of mistralai/Mistral-7B-v0.1, google/gemma-2-9b and openai/gpt-oss-20b."""
CHECKED = 8192
"""Tokens of the row whose error is measured; its longest run is longer than each window."""
TIMED = (8192, 65536)


@dataclass
class Inputs:
    """Of one layer and row of N tokens: [N, heads, width] each, and [heads]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    gradient: torch.Tensor
    """Of the outputs"""

    @property
    def differentiated(self) -> dict[str, torch.Tensor]:
        """By name."""
        found = {"query": self.query, "key": self.key, "value": self.value}
        return found if self.sinks is None else {**found, "sinks": self.sinks}


def measure(context: Context) -> None:
    """Errors of all layers, then times."""
    layers = {name: layer.toy() for name, layer in LAYERS.items()} if context.toy else LAYERS
    rows = {"packed": 0.0, "shared": SHARED}
    for name, layer in layers.items():
        for row, prefix in rows.items():
            length = 64 if context.toy else CHECKED
            context.measure(f"error/{name}/{row}", error, layer, length, prefix, context.device, expected=2.0)
    for name, layer in layers.items():
        for row, prefix in rows.items():
            for length in (64,) if context.toy else TIMED:
                expected = 1.0 if length < max(TIMED) else 10.0
                context.measure(
                    f"layer/{name}/{row}/{length}", timed, layer, length, prefix, context.device, expected=expected
                )


def random_inputs(layer: Layer, length: int, device: str) -> Inputs:
    """Random ones; where there is a soft-cap, queries are so large that it bends the scores."""
    torch.manual_seed(0)

    def one(heads: int, factor: float = 1.0) -> torch.Tensor:
        made = factor * torch.randn(length, heads, layer.width, device=device)
        return made.to(torch.bfloat16).requires_grad_()

    sinks = torch.randn(layer.heads, device=device).to(torch.bfloat16).requires_grad_() if layer.sinks else None
    query = one(layer.heads, 1.0 if layer.softcap is None else 0.4 * layer.softcap)
    key, value = one(layer.kv_heads), one(layer.kv_heads)
    return Inputs(query, key, value, sinks, torch.randn_like(query))


def computed(layer: Layer, inputs: Inputs, spans: Spans) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs [N, heads, width] and gradients of the library's attention."""
    given = inputs.differentiated
    output = attend(
        inputs.query, inputs.key, inputs.value, spans.segments(layer.window), rule(layer), given.get("sinks")
    )
    gradients = torch.autograd.grad(output, list(given.values()), inputs.gradient)
    return output.detach(), dict(zip(given, gradients, strict=True))


def rule(layer: Layer) -> ScoreRule:
    """The layer's rule of scores."""
    return ScoreRule(layer.width**-0.5, layer.softcap)


def error(layer: Layer, length: int, prefix: float, device: str) -> dict[str, Any]:
    """By tensor the norm of the difference to `dense` over the norm of its values; the kernels that computed it."""
    spans = uneven_row(length, prefix, device)
    inputs = random_inputs(layer, length, device)
    output, gradients = computed(layer, inputs, spans)
    squares: dict[str, list[torch.Tensor]] = {}
    for heads, groups, want in dense(layer, inputs, spans):
        got = {"output": output[:, heads], "query": gradients["query"][:, heads]}
        got |= {name: gradients[name][:, groups] for name in ("key", "value")}
        if layer.sinks:
            got["sinks"] = gradients["sinks"][heads]
        for name, expected in want.items():
            difference = got[name].double() - expected
            squares.setdefault(name, []).append(torch.stack([difference.square().sum(), expected.square().sum()]))
    totals = {name: torch.stack(parts).sum(0).tolist() for name, parts in squares.items()}
    kernels = [
        type(kernel_for(inputs.query, inputs.value, part, rule(layer))).__name__
        for part in spans.segments(layer.window)
    ]
    relative = {name: (wrong / whole) ** 0.5 for name, (wrong, whole) in totals.items()}
    return {**relative, "sinks": relative.get("sinks"), "kernels": ", ".join(kernels)}


def dense(layer: Layer, inputs: Inputs, spans: Spans) -> Iterator[tuple[slice, int, dict[str, torch.Tensor]]]:
    """Outputs and gradients in float64 from all scores of some heads at a time, without the library's attention.

    Yields (heads, their head of keys and values, values by name).
    """
    seen = visible(layer, spans)
    each = layer.heads // layer.kv_heads
    for group in range(layer.kv_heads):
        heads = slice(group * each, (group + 1) * each)
        query = inputs.query[:, heads].detach().double().requires_grad_()
        key, value = (x[:, group].detach().double().requires_grad_() for x in (inputs.key, inputs.value))
        leaves = {"query": query, "key": key, "value": value}
        totals = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        outputs = []
        of_sinks = []
        for head in range(each):  # one at a time: [N, N] in float64
            scores = query[:, head] @ key.T * layer.width**-0.5
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            own = dict(leaves)
            if inputs.sinks is not None:
                own["sinks"] = inputs.sinks[heads][head].detach().double().requires_grad_()
                scores = torch.cat([scores, own["sinks"].expand(len(scores), 1)], dim=1)
            output = scores.softmax(-1)[:, : len(key)] @ value
            found = torch.autograd.grad(output, list(own.values()), inputs.gradient[:, heads][:, head].double())
            for name, gradient in zip(own, found, strict=True):
                if name == "sinks":
                    of_sinks.append(gradient)
                else:
                    totals[name] += gradient
            outputs.append(output.detach())
        want = {"output": torch.stack(outputs, dim=1), **totals}
        yield heads, group, {**want, "sinks": torch.stack(of_sinks)} if of_sinks else want


def visible(layer: Layer, spans: Spans) -> torch.Tensor:
    """bool [N, N]: which token (row) sees which, from the runs: some behind one prompt, or none."""
    device = spans.device
    run = torch.repeat_interleave(torch.arange(len(spans.length)), torch.from_numpy(spans.length)).to(device)
    context = torch.from_numpy(spans.context).to(device)[run]
    own_start = torch.from_numpy(spans.start).to(device)[run]
    before = torch.where(context >= 0, torch.from_numpy(spans.length).to(device)[context.clamp(min=0)], 0)
    position = torch.arange(len(run), device=device) - own_start + before
    distance = position[:, None] - position
    sees = (run[:, None] == run) | (context[:, None] == run)
    sees &= distance >= 0
    if layer.window is not None:
        sees &= distance < layer.window
    return sees


def timed(layer: Layer, length: int, prefix: float, device: str) -> dict[str, float | None]:
    """Milliseconds and peak MiB of forward and backward; microseconds per million pairs that are seen."""
    spans = uneven_row(length, prefix, device)
    inputs = random_inputs(layer, length, device)
    ms = milliseconds(lambda: computed(layer, inputs, spans), device, repeats=3)
    with peak_memory(device) as peak:
        computed(layer, inputs, spans)
    return {"ms": ms, "peak_mib": peak.mib, "us_per_million_pairs": round(1e9 * ms / seen_pairs(layer, spans), 3)}


def seen_pairs(layer: Layer, spans: Spans) -> int:
    """How many pairs of a token and one that it sees the row has."""
    total = 0
    for length, before in zip(spans.length.tolist(), spans.context_length.tolist(), strict=True):
        window = layer.window or before + length
        # Its n-th token, from 1, sees min(before + n, window).
        growing = min(max(window - before, 0), length)
        total += growing * before + growing * (growing + 1) // 2 + (length - growing) * window
    return total
