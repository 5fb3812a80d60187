"""Measure what configs/calculator.yaml learns: accuracy and calls of the tool before and after its grpo stage, over
seeds.

    python scripts/benchmarks/calculator.py [--seeds 0 1 2] [--output calculator.json]

Accuracy is the share of right answers on the 200 held-out questions, greedy and over 8 samples each; calls are the
share of those conversations in which the tool was called.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import result_file

from rlvr import GRPOTrainer, Rollout, load_config

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "calculator.yaml"


def measure(trainer: GRPOTrainer) -> dict[str, float]:
    """Accuracy and calls as the policy is now, greedy and sampled."""
    collect = trainer.rollouts.collector.collect
    kept: list[list[Rollout]] = []

    def collecting(*arguments: Any) -> list[Rollout]:
        kept.append(collect(*arguments))
        return kept[-1]

    trainer.rollouts.collector.collect = collecting  # type: ignore[method-assign, assignment]
    results = trainer.evaluate()
    trainer.rollouts.collector.collect = collect  # type: ignore[method-assign]
    greedy, sampled = (sum(map(called, rollouts)) / len(rollouts) for rollouts in kept)
    accuracy = {"greedy": results["eval/greedy"], "sampled": results["eval/mean"]}
    return {**accuracy, "calls_greedy": greedy, "calls_sampled": sampled}


def called(rollout: Rollout) -> bool:
    """Whether the policy called the tool."""
    return any(segment.kind == "tool" for segment in rollout.segments)


def run(seed: int, folder: str) -> dict[str, object]:
    """One run of the whole config; its two measurements and its seconds."""
    off = ["logging.console=off", "evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false"]
    config = load_config(CONFIG, [f"run.seed={seed}", f"run.dir={folder}", f"run.name=seed-{seed}", *off])
    start = time.perf_counter()
    with GRPOTrainer(config=config) as trainer:
        trainer.train(trainer.resolved.plans[0].steps)
        before = measure(trainer)
        trainer.train()
        after = measure(trainer)
    return {"seed": seed, "seconds": round(time.perf_counter() - start), "before": before, "after": after}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description="Accuracy and tool calls of configs/calculator.yaml, before and after."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--output",
        type=result_file("seed", "seconds", "before", "after"),
        help="also write the results to this file, as JSON",
    )
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            results.append(run(seed, folder))
            print(json.dumps(results[-1]), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
