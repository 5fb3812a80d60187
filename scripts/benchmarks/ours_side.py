"""One short run of a workload by rlvr's GRPOTrainer, as a user would write it; speed.py starts it.

    python ours_side.py WORKLOAD_AS_JSON MODEL_FOLDER RESULT.json

The verifier is a plain function, and every setting that the workload does not name is the default.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from speed_workloads import Stopwatch, Workload, prompts, score

from rlvr import GRPOTrainer

PHASES = ("rollout", "verify", "score", "update", "publish", "unaccounted")


class Ends:
    """A tracker that hands each step's end to the stopwatch."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        self.stopwatch.ends.append(time.perf_counter())

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.stopwatch.ends.append(time.perf_counter())
        self.stopwatch.tokens.append(metrics["tokens/sampled"])
        self.stopwatch.rewards.append(metrics["reward/mean"])
        self.stopwatch.phases.append({name: metrics[f"time/{name}"] for name in PHASES})

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def finish(self) -> None:
        pass


def settings(workload: Workload, folder: str) -> dict[str, Any]:
    """The configuration of a workload: DAPO's loss over all tokens, one optimizer step for each batch."""
    return {
        "run": {"dir": folder, "steps": workload.steps},
        "model": {"device": "cpu"},
        "rollout": {
            "prompts_per_step": workload.prompts,
            "group_size": workload.group,
            "max_new_tokens": workload.new_tokens,
        },
        "algorithm": {"loss": {"average": "tokens"}},
        "optim": {"lr": workload.learning_rate, "micro_batch_size": workload.micro_batch},
    }


def workers_mib() -> float:
    """Memory of the processes below this one, each page shared among them counted in parts."""
    found = psutil.Process().children(recursive=True)
    return sum(one.memory_full_info().pss for one in found) / 2**20


WORKLOAD: Workload


def verifier(prompt: str, completion: str, token_ids: list[int]) -> float:
    """The reward. It holds no state, so that worker processes run it."""
    return score(WORKLOAD, prompt, completion, token_ids)


def main(model: str, result: str) -> None:
    torch.set_num_threads(1)
    workload, stopwatch = WORKLOAD, Stopwatch()
    tasks = [{"prompt": prompt} for prompt in prompts(workload)]
    with (
        tempfile.TemporaryDirectory() as folder,
        GRPOTrainer(model, tasks, verifier, settings(workload, folder), trackers=[Ends(stopwatch)]) as trainer,
    ):
        trainer.train()
        workers = workers_mib()
    versions = {package: version(package) for package in ("rlvr", "torch", "transformers")}
    found = {**stopwatch.summary(workload), "workers_mib": workers, "versions": versions}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    WORKLOAD = Workload(**json.loads(sys.argv[1]))
    main(*sys.argv[2:])
