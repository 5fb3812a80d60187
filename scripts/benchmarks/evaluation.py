"""Measure memory and time of an evaluation of many tasks with many samples, with an engine that makes up its tokens.

    python scripts/benchmarks/evaluation.py [--tasks 1000 10000] [--samples 64] [--output evaluation.json]

Everything but the engine and the verifier is the library's own: rollout buffer, plan, rollouts, task results,
estimators, intervals. Each size is a process of its own with one thread. Memory is the process's peak beyond what it
had before the first sample; `kept` is the written result, the part that must grow with the tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from result_file import result_file

FORMAT = 1
TOKENS = 256
"""Sampled tokens of a completion."""
PROMPT = 64


def measure(tasks: int, samples: int) -> dict[str, Any]:
    """One evaluation: seconds, and MiB."""
    from rlvr.config.config_loading import load_config
    from rlvr.data import History
    from rlvr.evaluation import describe, evaluate
    from rlvr.records import Rollout, StopReason, Task, Verdict
    from rlvr.rollout import Collector, Completion, Request, RolloutContext, single_turn

    logprobs, versions = np.full(TOKENS, -0.5, np.float32), np.ones(TOKENS, np.int32)

    async def generate(request: Request) -> Completion:
        ids = np.random.default_rng(request.seed).integers(0, 32000, TOKENS)
        return Completion(ids, logprobs.copy(), versions.copy(), StopReason.END, "word " * TOKENS, 0.0)

    async def verify(rollout: Rollout) -> Rollout:
        answer = str(int(rollout.token_ids[-1]) % 7)
        rollout.verdicts = {"stub": Verdict.from_score(float(answer == "0"), answer=answer)}
        return rollout

    collector = Collector()

    def collect(draws: Any, sampling: Any, count: int) -> list[Rollout]:
        context = RolloutContext(
            engine=SimpleNamespace(generate=generate),
            verification=SimpleNamespace(verify=verify, by_group=lambda task: False),
            prompts=lambda task: tuple(range(PROMPT)),
            sampling=sampling,
            group_size=count,
            context=4096,
            history=History(),
            seed_path=("evaluation",),
        )
        return collector.collect(draws, single_turn, context, 3600.0)

    config = load_config({"evaluation": {"samples": samples, "k": sorted({1, 8, samples}), "greedy": False}})
    made = [Task(f"task-{number}", f"prompt {number}", answer="0") for number in range(tasks)]
    before, start = peak_mib(), time.perf_counter()
    done = evaluate(made, config, collect)
    sampled = time.perf_counter() - start
    written = json.dumps(describe(done, config))
    collector.close()
    return {
        "tasks": tasks,
        "samples": samples,
        "rollouts": tasks * samples,
        "seconds": round(time.perf_counter() - start, 2),
        "seconds_sampling_and_tallying": round(sampled, 2),
        "peak_mib_beyond_start": round(peak_mib() - before, 1),
        "start_mib": round(before, 1),
        "kept_mib": round(len(written) / 2**20, 2),
        "pass@8": done.results["eval/pass@8"],
    }


def peak_mib() -> float:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument(
        "--output",
        type=result_file("format", "machine", "evaluation"),
        default=str(Path(__file__).with_suffix(".json")),
    )
    parser.add_argument("--one", action="store_true", help="measure in this process, and print")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.tasks[0], options.samples)))
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sizes = []
    for count in options.tasks:
        command = [sys.executable, __file__, "--one", "--tasks", str(count), "--samples", str(options.samples)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        sizes.append(json.loads(ended.stdout.splitlines()[-1]))
        print(sizes[-1])
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    old = json.loads(options.output.read_text()) if options.output.exists() else {}
    found = {**old, "format": FORMAT, "machine": machine, "tokens": TOKENS, "evaluation": sizes}
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
