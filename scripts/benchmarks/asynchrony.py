"""Compare the steps a minute of a run that samples ahead of training with one that does not (rollout.staleness 1, 0).

    python scripts/benchmarks/asynchrony.py [--engine vllm] [--output scripts/benchmarks/asynchrony.json]

Sampling is real. The verifier waits, and the trainer waits in addition to its real update, each as long as sampling
takes without either (measured first), like a trainer on another device. Both runs are made in turns; the figures
are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version

import torch
from result_file import result_file

from rlvr import GRPOTrainer

TREE = {
    "model": {"scratch": {"context": 512, "hidden_size": 128, "layers": 4}, "device": "cpu"},
    "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 128, "ignore_eos": True},
    "data": {"train": {"name": "arithmetic", "count": 500}},
    "logging": {"console": "off", "rollouts": 0},
    "evaluation": {"at_start": False, "at_end": False},
}


def run(engine: str, staleness: int, steps: int, wait: float) -> list[dict]:
    """The metrics of a run whose verifier and trainer wait for `wait` seconds each."""

    async def verifier(completion: str) -> float:
        await asyncio.sleep(wait)
        return len(set(completion)) / 100

    with tempfile.TemporaryDirectory() as folder:
        tree = {**TREE, "run": {"dir": folder, "steps": steps}}
        tree["rollout"] = {**TREE["rollout"], "engine": engine, "staleness": staleness}
        with GRPOTrainer(verifier=verifier, config=tree) as trainer:
            update = trainer.training.learner.update

            def slow(*arguments: object) -> object:
                start = time.perf_counter()
                result = update(*arguments)
                time.sleep(max(0.0, wait - (time.perf_counter() - start)))
                return result

            trainer.training.learner.update = slow
            return trainer.train()


def seconds_per_step(rows: list[dict]) -> float:
    """Median over the steps after the first three, in which things are compiled and the window fills."""
    return statistics.median(row["time/step"] for row in rows[3:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--output",
        type=result_file("command", "engine", "sampling_seconds"),
        default="scripts/benchmarks/asynchrony.json",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    alone = run(arguments.engine, 0, 8, 0.0)
    sampling = statistics.median(row["time/rollout"] for row in alone[3:])
    rounds = []
    for _ in range(arguments.rounds):
        rows = {k: run(arguments.engine, k, arguments.steps, sampling) for k in (0, 1)}
        seconds = {k: seconds_per_step(of) for k, of in rows.items()}
        rounds.append(
            {
                "staleness_0_seconds": seconds[0],
                "staleness_1_seconds": seconds[1],
                "ratio": seconds[0] / seconds[1],
                "staleness_max": max(row["policy/staleness_max"] for row in rows[1]),
                "engine_idle_share": [
                    statistics.median(row["time/engine_idle"] / row["time/step"] for row in of[3:])
                    for of in rows.values()
                ],
            }
        )
        print(rounds[-1], flush=True)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "engine": arguments.engine,
        "sampling_seconds": sampling,
        "update_seconds_without_waiting": statistics.median(row["time/update"] for row in alone[3:]),
        "ratio_of_steps_per_minute": statistics.median(one["ratio"] for one in rounds),
        "rounds": rounds,
        "torch": version("torch"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread for the trainer",
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
