"""Count the FLOPs of an update over long packed rows that are executed, over those that are needed, without a GPU.

    python scripts/benchmarks/packed_flops.py [--output scripts/benchmarks/packed_flops.json]

Packed rows of 16,384 and of 65,536 tokens: one rollout with a prompt of 2,048 tokens, or several that have the prompt
in common, which is computed once. The library's own passes run on tensors with shapes and no contents
(dispatch_counts.py), in bfloat16, with the attention calls that it makes on a GPU. Layers are alike: two and three of
them are counted at their real widths, and what the third adds is a layer. The head's tiles are all counted.

Conventions. A multiplication and an addition are two FLOPs. Needed: six FLOPs for each weight that a token is
multiplied by; for each query and each key that it sees, so of causal attention the half, two products forward and four
backward; of the head, logits once and two gradients, at the trained tokens. Executed: matrix products and attention as
they are dispatched, a causal call with the pairs that are seen. (Flash attention skips blocks of keys that no query of
a block sees; the hidden half of the blocks on the diagonal is not counted.) The scores of flash attention's backward
pass and the head's second logits are computed again; each is also said apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from decoder_counts import MODELS, fake_policy
from dispatch_counts import Counting, Counts
from launches import HEADS, Problem, counted, ours, row
from result_file import result_file, result_head
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from rlvr.policy.attention import Segments, Spans, merged
from rlvr.policy.attention.calls import Gradients
from rlvr.policy.attention.kernels import TorchFlash
from rlvr.policy.attention.packed_rows import hook
from rlvr.policy.flops import ModelFlops
from rlvr.policy.microbatch import call_pairs

PROMPT = 2048
ROWS = {
    "16,384: one rollout": (1, 14_336),
    "16,384: 2 rollouts, prompt once": (2, 7_168),
    "65,536: one rollout": (1, 63_488),
    "65,536: 8 rollouts, prompt once": (8, 7_936),
}
"""Rollouts of a row and the tokens of their responses, which are trained."""
DEPTHS = (2, 3)
"""Layers that are counted."""
CHUNK = 65_536
"""Numbers of a tensor that a block of a multi-tensor kernel takes."""
BLOCKS = 320
"""Of a launch at most."""
TENSORS = {1: 110, 4: 36}
"""Lists of tensors -> tensors of a launch at most."""
BYTES_A_WEIGHT = {"gradients to zero": 4, "norm": 4, "clipping": 8, "AdamW": 28}
"""Of float32: AdamW reads and writes the weight and two moments, and reads the gradient."""


class WithoutAttention(Counting):
    """Counts FLOPs of products of matrices alone: in here the lengths of a call's stretches have no values."""

    def flops_of(self, packet: Any, args: Any, kwargs: Any, made: Any) -> int:
        """FLOPs of an operation that is no attention."""
        return 0 if "flash_attention" in packet.__name__ else super().flops_of(packet, args, kwargs, made)


class CountedFlash(TorchFlash):
    """The kernel of a GPU, which counts the FLOPs of the pairs that a call computes."""

    flops = 0

    def forward(self, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Two products: scores and outputs."""
        CountedFlash.flops += 2 * 2 * query.shape[1] * query.shape[2] * computed_pairs(rest[2])
        return super().forward(query, *rest)

    def backward(self, gradient: torch.Tensor, *rest: Any) -> Gradients:
        """Five products: scores again, the gradients of probabilities, values, queries and keys."""
        CountedFlash.flops += 2 * 5 * gradient.shape[1] * gradient.shape[2] * computed_pairs(rest[5])
        return super().backward(gradient, *rest)


def computed_pairs(segments: Segments) -> int:
    """Pairs of a query and a key in a call without a window."""
    queries, keys = segments.query_length, segments.key_length
    # The last query of a causal stretch sees all of its keys, each one before it a key less.
    hidden = queries * (queries - 1) // 2 if segments.causal else 0
    return int((queries * keys - hidden).sum())


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass of a decoder over a row."""

    counts: Counts
    """Its FLOPs are without attention."""
    attention: float
    needed: float
    needed_attention: float

    def __sub__(self, other: Passes) -> Passes:
        return self + other * -1

    def __add__(self, other: Passes) -> Passes:
        return Passes(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def __mul__(self, times: int) -> Passes:
        return Passes(*(getattr(self, name) * times for name in vars(self)))


def spans_of(rollouts: int, response: int) -> Spans:
    """The runs of a row: of one rollout prompt and response together, of several the prompt and each response."""
    if rollouts == 1:
        return Spans(np.asarray([PROMPT + response]), np.asarray([-1]), torch.device("cpu"))
    lengths = [PROMPT] + rollouts * [response]
    return Spans(np.asarray(lengths), np.asarray([-1] + rollouts * [0]), torch.device("cpu"))


def passes_of(model: str, layers: int, spans: Spans) -> Passes:
    """The passes of a model with so many layers."""
    tokens = int(spans.length.sum())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
        mock.patch.object(merged, "kernel_for", return_value=CountedFlash()),
    ):
        policy = fake_policy(model, layers)
        hook(policy.causal_lm)
        # Indices are made once for the row, not in each layer.
        for part in spans.segments(None):
            _ = part.varlen
        CountedFlash.flops = 0
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        positions = torch.arange(tokens)[None]
        with policy.training(), WithoutAttention() as mode:
            hidden = policy.hidden_states(ids, positions, spans)
            hidden.backward(torch.empty_like(hidden))
    sizes = ModelFlops.of(policy)
    pairs = sum(map(call_pairs, spans.segments(None)))
    return Passes(mode.counts, CountedFlash.flops, 6 * sizes.weights * tokens, 12 * sizes.channels * pairs * layers)


def counted_row(model: str, rollouts: int, response: int) -> dict[str, Any]:
    """The figures of a row."""
    spans = spans_of(rollouts, response)
    tokens, trained = int(spans.length.sum()), rollouts * response
    # Each with its own indices, which belong to the tensors of its mode.
    few, more = (passes_of(model, layers, spans_of(rollouts, response)) for layers in DEPTHS)
    whole = few + (more - few) * (MODELS[model]["num_hidden_layers"] - DEPTHS[0])
    width, vocabulary = HEADS[model], MODELS[model]["vocab_size"]
    of_head = sum(counted(ours, Problem(width, vocabulary, trained), {}, kernels=True).values(), Counts())
    logits = 2 * trained * vocabulary * width
    # Of the five products of attention's backward pass one is the scores again; two are in the forward pass.
    scores = whole.attention / 7
    executed = whole.counts.flops + whole.attention + of_head.flops
    needed = whole.needed + whole.needed_attention + 3 * logits
    return {
        "tokens": tokens,
        "trained": trained,
        **{key: value for key, value in row(whole.counts + of_head, tokens).items() if key != "flops a token"},
        "flops a token": {
            "needed": round(needed / tokens),
            "of it attention": round(whole.needed_attention / tokens),
            "executed": round(executed / tokens),
            "of it scores again": round(scores / tokens),
            "of it logits again": round(logits / tokens),
        },
        "executed over needed": {
            "all": round(executed / needed, 4),
            "without the head's second logits": round((executed - logits) / needed, 4),
            "without what is computed again": round((executed - logits - scores) / needed, 4),
        },
    }


def counted_rows(model: str) -> dict[str, Any]:
    """The figures of each row, which are also printed as soon as they are there."""
    found = {}
    for name, sizes in ROWS.items():
        found[name] = counted_row(model, *sizes)
        print(model, name, json.dumps(found[name]), file=sys.stderr, flush=True)
    return found


def multi_tensor_launches(sizes: list[int], lists: int) -> int:
    """Launches of an operation of torch's over many tensors of these sizes at once, with `lists` tensors of each.

    As aten/src/ATen/native/cuda/MultiTensorApply.cuh fills them: a launch is full with its blocks or its tensors.
    """
    launches = tensors = blocks = 0
    for size in sizes:
        tensors += 1
        chunks = -(-size // CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == BLOCKS or (last and tensors == TENSORS[lists]):
                launches += 1
                blocks = 0
                # A tensor that is not finished is the first of the next launch.
                tensors = 0 if last else 1
    return launches + (blocks > 0)


def optimizer_step(model: str) -> dict[str, Any]:
    """Kernels over all weights and bytes of a step: gradients to zero, their norm, clipping, fused AdamW, its counts of
    steps. Weights, gradients and moments are in float32 on one device, as the plain backend has them."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**MODELS[model] | {"num_hidden_layers": 1})
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    layers = MODELS[model]["num_hidden_layers"]
    every = [p for name, p in parameters.items() for _ in range(layers if ".layers." in name else 1)]
    groups = [[p.numel() for p in every if (p.ndim >= 2) == matrices] for matrices in (True, False)]
    sizes = [size for group in groups for size in group]
    kernels = {
        "gradients to zero": len(sizes),
        "norm": multi_tensor_launches(sizes, 1),
        "clipping": multi_tensor_launches(sizes, 1),
        "counts of steps": sum(multi_tensor_launches([1] * len(group), 1) for group in groups),
        "AdamW": sum(multi_tensor_launches(group, 4) for group in groups),
    }
    return {"weights": sum(sizes), "launches": kernels, "bytes a weight": BYTES_A_WEIGHT}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="FLOPs of packed rows, executed over needed, counted without a GPU.")
    parser.add_argument("--models", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument(
        "--output", type=result_file("command", "rows", "models", "optimizer step"), help="also write JSON here"
    )
    arguments = parser.parse_args()
    results = {
        **result_head("packed_flops.py --output scripts/benchmarks/packed_flops.json", "transformers"),
        "prompt": PROMPT,
        "rows": {name: list(sizes) for name, sizes in ROWS.items()},
        "models": {model: counted_rows(model) for model in arguments.models},
        "optimizer step": {model: optimizer_step(model) for model in arguments.models},
    }
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
