"""Measure the time and memory of ZeRO against plain data parallel, on the ranks of one machine.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 scripts/benchmarks/distributed.py [--json FILE]
        [--hidden 512] [--layers 4] [--sequences 8] [--tokens 64] [--rounds 5]

Each backend trains the same model on the same tokens (a likelihood loss, AdamW); rank 0 prints and writes medians.

- time: seconds of an optimizer step by the wall clock, and CPU seconds of rank 0, with the backends taking turns so
  that a busy machine slows all alike. The overhead is the ratio to plain.
- memory: what a rank holds between steps for weights, gradients and optimizer state, and the most that it held in a
  step, of tensors that belong to them (on a GPU: torch's own count of allocated memory, activations included).

On a CPU the model is small and ranks exchange over loopback (gloo): the ratios have the cost of the code, not of a
cluster.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
from result_file import result_file

from rlvr import registry
from rlvr.config import ModelConfig, ScratchConfig
from rlvr.distributed import World
from rlvr.policy import Policy, load_policy

BACKENDS: dict[str, Any] = {
    "plain": "plain",
    "zero2": {"name": "deepspeed", "zero_stage": 2},
    "zero3": {"name": "deepspeed", "zero_stage": 3},
}


def held(seen: dict[int, int]) -> int:
    """Bytes of the distinct storages of all float tensors that are alive and of at least a KiB."""
    seen.clear()
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.Tensor) and thing.is_floating_point() and thing.device.type != "meta":
                storage = thing.untyped_storage()
                if storage.nbytes() >= 1024:
                    seen[storage.data_ptr()] = storage.nbytes()
        except Exception:  # an object in the middle of its end, or a proxy
            continue
    return sum(seen.values())


class Candidate:
    """One backend on its own copy of the model."""

    def __init__(self, name: str, options: argparse.Namespace, world: World) -> None:
        self.name, self.world = name, world
        self.before = held({})
        scratch = ScratchConfig(
            hidden_size=options.hidden,
            layers=options.layers,
            heads=8,
            kv_heads=8,
            intermediate_size=4 * options.hidden,
            context=options.tokens,
        )
        self.policy: Policy = load_policy(ModelConfig(scratch=scratch))
        self.parameters = sum(p.numel() for p in self.policy.model.parameters())
        self.backend = registry.build("backend", BACKENDS[name]).open(self.policy, "adamw", world)
        generator = torch.Generator().manual_seed(world.rank)
        shape = (options.sequences, options.tokens)
        self.ids = torch.randint(3, len(self.policy.tokenizer), shape, generator=generator).to(self.policy.device)

    def step(self) -> tuple[float, float]:
        """(wall seconds, CPU seconds) of one optimizer step."""
        self.world.barrier("the others")
        wall, cpu = time.perf_counter(), time.process_time()
        self.backend.zero()
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        logits = self.policy.logits(self.policy.hidden_states(self.ids, positions))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())
        self.backend.backward(loss / self.world.size)
        self.backend.step(1e-5, 1.0)
        if self.ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - cpu


def memory_of(name: str, options: argparse.Namespace, world: World) -> dict[str, float]:
    """Bytes per parameter that a backend alone holds on this rank, after steps and at most within one."""
    candidate = Candidate(name, options, world)
    for _ in range(2):
        candidate.step()
    gc.collect()
    if torch.cuda.is_available():
        between = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        candidate.step()
        return {
            "between": between / candidate.parameters,
            "most": torch.cuda.max_memory_allocated() / candidate.parameters,
        }
    between, most = held({}) - candidate.before, 0
    taken = candidate.backend.step

    def watched(*arguments: float) -> float:
        nonlocal most
        most = max(most, held({}) - candidate.before)  # after the last backward pass: gradients are all there
        return taken(*arguments)

    candidate.backend.step = watched
    candidate.step()
    return {"between": between / candidate.parameters, "most": most / candidate.parameters}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=result_file("ranks", "device"))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=list(BACKENDS), help="measure only the memory of this backend")
    options = parser.parse_args()
    world = World.from_environment()
    result: dict[str, Any] = {"ranks": world.size, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    if options.memory:  # a process of its own: another backend's model would stand beside it
        result["memory"] = {options.memory: memory_of(options.memory, options, world)}
    else:
        candidates = [Candidate(name, options, world) for name in BACKENDS]
        result["parameters"] = candidates[0].parameters
        for candidate in candidates:
            candidate.step()
        rounds = [{c.name: c.step() for c in candidates} for _ in range(options.rounds)]
        result["time"] = {
            name: {
                "wall_s": statistics.median(r[name][0] for r in rounds),
                "cpu_s": statistics.median(r[name][1] for r in rounds),
                "wall_over_plain": statistics.median(r[name][0] / r["plain"][0] for r in rounds),
                "cpu_over_plain": statistics.median(r[name][1] / r["plain"][1] for r in rounds),
            }
            for name in BACKENDS
        }
    if world.is_main:
        if options.json:
            known = json.loads(options.json.read_text()) if options.json.exists() else {}
            merged = {**known, **result, "memory": {**known.get("memory", {}), **result.get("memory", {})}}
            if {"plain", "zero3"} <= merged["memory"].keys():
                merged["memory"]["zero3_over_plain"] = {
                    key: merged["memory"]["zero3"][key] / merged["memory"]["plain"][key] for key in ("between", "most")
                }
            options.json.write_text(json.dumps(merged, indent=1) + "\n")
        print(json.dumps(result, indent=1))
    world.close()


if __name__ == "__main__":
    main()
