"""Count kernel launches and bytes of attention layers with soft-caps, sinks and windows on a GPU.

    python scripts/benchmarks/attention_launches.py [--output scripts/benchmarks/attention_launches.json]

One layer's attention in bfloat16, forward and backward, over a packed row whose responses share their prompt, by the
kernels that a GPU without the package flash-attn takes. Nothing is computed: tensors have shapes and no contents
(dispatch_counts.py), so no GPU is needed and no machine changes a number. Layers with a soft-cap are also counted as if
there were none: these are the launches and bytes of a kernel that caps scores itself, as flash-attn 2 does.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dispatch_counts import Counting, Counts
from result_file import result_file, result_head
from torch._subclasses.fake_tensor import FakeTensorMode

from rlvr.policy.attention import Spans
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import kernels_of
from rlvr.policy.attention.merged import attend


@dataclass(frozen=True)
class Layer:
    """The sizes of a model's attention."""

    heads: int
    groups: int
    width: int
    window: int
    """Keys that a query sees in every second layer"""
    softcap: float | None = None
    sinks: bool = False


MODELS = {
    "Gemma-2-9B": Layer(16, 8, 256, 4096, softcap=50.0),
    "gpt-oss-20b": Layer(64, 8, 64, 128, sinks=True),
}
"""From the models' own config.json on the Hugging Face hub."""
PROMPT = 2048
ROWS = {16_384: (2, 7_168), 65_536: (8, 7_936)}
"""Tokens of a row -> the responses to the prompt, and their tokens."""


def counted(layer: Layer, tokens: int, window: int | None, capped: bool) -> dict[str, Counts]:
    """The forward and the backward pass of a layer's attention."""
    responses, length = ROWS[tokens]
    lengths = np.asarray([PROMPT] + responses * [length])
    contexts = np.asarray([-1] + responses * [0])
    spans = Spans(lengths, contexts, torch.device("cpu"))
    scoring = ScoreRule(layer.width**-0.5, layer.softcap if capped else None)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)

    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of("cuda"):
        query, key, value = (empty(tokens, heads, layer.width) for heads in (layer.heads, layer.groups, layer.groups))
        sinks = empty(layer.heads) if layer.sinks else None
        segments = spans.segments(window)
        # Indices are made once for a row, not in each layer.
        for part in segments:
            _ = part.varlen, part.blocks
        with Counting() as mode:
            output = attend(query, key, value, segments, scoring, sinks)
            forward = mode.counts
            mode.counts = Counts()
            output.backward(torch.empty_like(output))
    return {"forward": forward, "backward": mode.counts}


def table() -> dict[str, Any]:
    """The counts, by model, tokens and kind of layer."""
    found: dict[str, Any] = {}
    for model, layer in MODELS.items():
        found[model] = {}
        for tokens in ROWS:
            kinds = {"full attention": None, "window": layer.window}
            found[model][str(tokens)] = {
                f"{kind}{note}": {
                    name: {"launches": counts.launches, "bytes": counts.bytes}
                    for name, counts in counted(layer, tokens, window, capped).items()
                }
                for kind, window in kinds.items()
                for note, capped in ((("", True), (", cap in the kernel", False)) if layer.softcap else (("", True),))
            }
    return found


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Launches and bytes of attention, counted without a GPU.")
    parser.add_argument("--output", type=result_file("command", "prompt", "layers"), help="also write JSON here")
    arguments = parser.parse_args()
    results = {
        **result_head("attention_launches.py --output scripts/benchmarks/attention_launches.json"),
        "prompt": PROMPT,
        "rows": {str(tokens): list(responses) for tokens, responses in ROWS.items()},
        "layers": table(),
    }
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
