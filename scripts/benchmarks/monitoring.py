"""Measure the time of monitors and logging in a step of W1 (speed.py's shortest workload), part by part.

    python scripts/benchmarks/monitoring.py [--steps 60] [--output monitoring.json]

One run in this process with one thread and the default settings: plain console, metrics.jsonl, all monitors of health,
all rollouts of every step on disk, written by a thread of their own whose CPU time is listed by itself. Each part is
timed where the trainer calls it, in the same steps that it is compared with, by the CPU time of the training thread and
by the clock; a figure is the median over the steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_file import result_file

os.environ.setdefault("OMP_NUM_THREADS", "1")
FORMAT = 1
DROPPED = 5
"""Steps at the start that are not counted."""


class Meter:
    """Seconds by part and step: `meter.wrap(owner, "method", "part")`. A part inside another counts for the inner
    one."""

    def __init__(self) -> None:
        self.step: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.steps: list[dict[str, tuple[float, float]]] = []
        self._inside: list[list[float]] = []

    def wrap(self, owner: Any, method: str, piece: str) -> None:
        """Time every call of the method from now on."""
        setattr(owner, method, self.timed(getattr(owner, method), piece))

    def timed(self, function: Callable[..., Any], piece: str) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time(), time.perf_counter()
            self._inside.append([0.0, 0.0])
            try:
                return function(*arguments, **named)
            finally:
                took = time.thread_time() - began[0], time.perf_counter() - began[1]
                inner = self._inside.pop()
                for clock in (0, 1):
                    self.step[piece][clock] += took[clock] - inner[clock]
                    if self._inside:
                        self._inside[-1][clock] += took[clock]

        return call

    def end_of_step(self) -> None:
        """Begin the next step."""
        self.steps.append({name: (cpu, wall) for name, (cpu, wall) in self.step.items()})
        self.step.clear()


def measure(steps: int) -> dict[str, Any]:
    """Medians over the steps, in milliseconds, and shares of the step."""
    from ours_side import settings
    from speed_workloads import WORKLOADS, prompts, score, write_model

    import rlvr.monitor.batch as of_batch
    import rlvr.run.reporting as reporting
    import rlvr.stages.grpo.stage as stage
    import rlvr.trainer as loop
    from rlvr import GRPOTrainer

    workload, meter = WORKLOADS["W1"], Meter()
    for module in (stage, loop, reporting):
        for name in ("batch_metrics", "advantage_metrics", "staleness_metrics", "sample_rows", "record"):
            if hasattr(module, name):
                setattr(module, name, meter.timed(getattr(module, name), "metrics"))
    assert hasattr(of_batch, "batch_metrics")
    with tempfile.TemporaryDirectory() as folder:
        write_model(workload, Path(folder) / "model")
        tree = settings(workload, folder)
        tree["run"]["steps"] = steps
        tasks = [{"prompt": text} for text in prompts(workload)]

        def even(prompt: str, completion: str, token_ids: list[int]) -> float:
            return score(workload, prompt, completion, token_ids)

        with GRPOTrainer(str(Path(folder) / "model"), tasks, even, tree) as trainer:
            meter.wrap(trainer.reporting.console, "step", "console")
            meter.wrap(trainer.reporting.health, "step", "health")
            meter.wrap(trainer.reporting.rollout_log, "later", "rollouts handed over")
            behind: list[float] = []
            write = trainer.reporting.rollout_log.write

            def timed(*arguments: Any) -> Any:
                began = time.thread_time()
                try:
                    return write(*arguments)
                finally:
                    behind.append(time.thread_time() - began)

            trainer.reporting.rollout_log.write = timed  # type: ignore[method-assign]
            meter.wrap(trainer.folder.metrics, "append", "metrics.jsonl")
            ends: list[tuple[float, float]] = []
            after = trainer.checkpointer.after_step

            def after_step(last: bool) -> Any:
                meter.end_of_step()
                ends.append((time.thread_time(), time.perf_counter()))
                return after(last)

            trainer.checkpointer.after_step = after_step  # type: ignore[method-assign]
            trainer.train()
    return summary(meter, ends) | {"rollouts_thread_cpu_ms": round(1000 * statistics.median(behind[DROPPED:]), 3)}


def summary(meter: Meter, ends: list[tuple[float, float]]) -> dict[str, Any]:
    """The table: for each part and for all, milliseconds a step and the share of the step, by CPU and by the clock."""
    step = [
        statistics.median(b[clock] - a[clock] for a, b in zip(ends[DROPPED:], ends[DROPPED + 1 :], strict=False))
        for clock in (0, 1)
    ]
    counted = meter.steps[DROPPED:]
    names = sorted({name for one in counted for name in one})
    pieces = {
        name: [1000 * statistics.median(one.get(name, (0.0, 0.0))[clock] for one in counted) for clock in (0, 1)]
        for name in names
    }
    total = [1000 * statistics.median(sum(v[clock] for v in one.values()) for one in counted) for clock in (0, 1)]
    return {
        "steps": len(counted),
        "step_ms": round(1000 * step[1], 2),
        "step_thread_cpu_ms": round(1000 * step[0], 2),
        "pieces_cpu_ms": {name: round(cpu, 3) for name, (cpu, _) in pieces.items()},
        "pieces_wall_ms": {name: round(wall, 3) for name, (_, wall) in pieces.items()},
        "all_cpu_ms": round(total[0], 3),
        "all_wall_ms": round(total[1], 3),
        "share_of_step": round(total[1] / (1000 * step[1]), 4),
        "cpu_over_step": round(total[0] / (1000 * step[1]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--output",
        type=result_file("format", "machine", "workload", "step_ms"),
        default=str(Path(__file__).with_suffix(".json")),
    )
    options = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    found = {"format": FORMAT, "machine": machine, "workload": "W1", **measure(options.steps)}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
