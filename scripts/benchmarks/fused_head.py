"""Compare seconds and memory of the fused head with two plain ways to the same log-probs, entropies and
gradients.

    python scripts/benchmarks/fused_head.py [--repeats 5] [--output fused_head.json]

Each round runs every way once, forward and backward on one thread, log-probs with gradient and entropy without: whole
(the logits of all tokens at once, autograd), checkpointed (chunks of 2**24 logits that autograd computes again) and
fused. Seconds are medians of this process' CPU time over the rounds. Memory is the peak of a process of its own that
does one forward and backward: resident bytes beyond those before it and beyond the two gradients that it returns.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from result_file import result_file, result_head
from torch.utils.checkpoint import checkpoint

from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.model import Head

SHAPES = {"W1": (2048, 19, 64), "W4": (4096, 32_000, 256)}
"""Trained tokens, vocabulary, width of the hidden states."""
MEMORY = [
    (8192, 32_000, 64),
    (8192, 64_000, 64),
    (8192, 152_000, 64),
    (8192, 152_000, 256),
    (4096, 152_000, 64),
    (16_384, 152_000, 64),
]
"""The same, for the fused head; the other ways are measured at the first."""
CHUNK = 1 << 24

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def fused(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    asked = {"logprobs": True, "entropy": False}
    return fused_statistics(Head((hidden,), (weight,)), temperature, asked, ids)["logprobs"]


def whole(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight) / temperature[:, None]
    logits = logits - logits.detach().amax(-1, keepdim=True)
    normaliser = torch.logsumexp(logits, dim=-1)
    with torch.no_grad():
        probabilities = torch.exp(logits - normaliser[:, None])
        normaliser - (probabilities * logits.nan_to_num(neginf=0.0)).sum(-1)
    return logits.gather(-1, ids[:, None]).squeeze(-1) - normaliser


def checkpointed(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    size = max(1, CHUNK // len(weight))
    if len(hidden) <= size:
        return whole(hidden, weight, ids, temperature)
    parts = [slice(start, start + size) for start in range(0, len(hidden), size)]
    return torch.cat(
        [checkpoint(whole, hidden[p], weight, ids[p], temperature[p], use_reentrant=False) for p in parts]  # type: ignore[misc]
    )


WAYS: dict[str, Way] = {"whole": whole, "checkpointed": checkpointed, "fused": fused}


def problem(tokens: int, vocabulary: int, width: int) -> list[torch.Tensor]:
    """Random hidden states, weights, token ids and temperatures."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=make).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=make) / width**0.5).requires_grad_()
    return [hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=make), torch.ones(tokens)]


def once(way: str, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Forward and backward; the gradients of hidden states and weights."""
    logprobs = WAYS[way](*inputs)
    return torch.autograd.grad(logprobs, inputs[:2], torch.linspace(-1, 1, len(logprobs)))


def seconds(shape: tuple[int, int, int], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each way, round by round; first that they agree."""
    inputs = problem(*shape)
    want = once("whole", inputs)
    for way in WAYS:
        for got, right in zip(once(way, inputs), want, strict=True):
            assert float((got - right).norm() / right.norm()) < 1e-5, way
    calls = max(1, 10_000_000 // (shape[0] * shape[1]))
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, times in taken.items():
            start = time.process_time()
            for _ in range(calls):
                once(way, inputs)
            times.append((time.process_time() - start) / calls)
    return {way: float(f"{statistics.median(times):.3g}") for way, times in taken.items()}


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak(way: str, shape: tuple[int, int, int]) -> float:
    """MiB beyond what was resident before and the gradients; a small problem goes first, for what libraries set up."""
    once(way, problem(64, 3000, shape[2]))
    inputs = problem(*shape)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    gradients = once(way, inputs)
    own = sum(g.numel() * g.element_size() for g in gradients)
    return round((resident("VmHWM") - before - own) / 2**20, 1)


def peak_elsewhere(way: str, shape: tuple[int, int, int]) -> float:
    """`peak` in a fresh process."""
    command = [sys.executable, __file__, "--peak", way, *map(str, shape)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Seconds and peak memory of the fused head and of plain ways.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--output",
        type=result_file("command", "shapes", "peak MiB"),
        help="also write the results to this file, as JSON",
    )
    parser.add_argument("--peak", nargs=4, metavar=("WAY", "T", "V", "H"), help="only print one peak, in MiB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        way, *shape = arguments.peak
        print(peak(way, tuple(map(int, shape))))  # type: ignore[arg-type]
        return 0
    times = {name: seconds(shape, arguments.repeats) for name, shape in SHAPES.items()}
    asked = [("fused", shape) for shape in MEMORY] + [(way, MEMORY[0]) for way in ("checkpointed", "whole")]
    results = {
        **result_head("fused_head.py --output scripts/benchmarks/fused_head.json"),
        "repeats": arguments.repeats,
        "shapes": {name: dict(zip("TVH", shape, strict=True)) for name, shape in SHAPES.items()},
        "cpu seconds": times,
        "peak MiB": [
            {"way": way, **dict(zip("TVH", shape, strict=True)), "MiB": peak_elsewhere(way, shape)}
            for way, shape in asked
        ],
    }
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
