"""Measure the cost of saving for a step, and of resuming for a run.

    python scripts/benchmarks/checkpoints.py [--hidden 768] [--output scripts/benchmarks/checkpoints.json]

A run of a model from scratch saves after every step; of each save: how long the step waited for it (copy and
back-pressure) and how long the write took in its thread. The first save, whose host memory is new, is listed by itself.
The run is then made once more with a write while the step waits (checkpoint.background false). A resume is a process of
its own of configs/quickstart.yaml, beside one that only imports what it needs: CPU seconds of both, and inside the
first what each part took.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from result_file import result_file

from rlvr import GRPOTrainer

ROOT = Path(__file__).resolve().parents[2]


def timed(owner: Any, name: str, into: list[float]) -> None:
    """Note the seconds of every call of a method."""
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*arguments, **options)
        finally:
            into.append(time.perf_counter() - start)

    setattr(owner, name, outer)


def saving(hidden: int, steps: int, background: bool) -> dict[str, Any]:
    """Seconds that each step waited for its save, and that each write took."""
    waits: list[float] = []
    writes: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "run": {"dir": folder, "steps": steps},
            "model": {"device": "cpu", "scratch": {"context": 256, "hidden_size": hidden, "layers": 8, "heads": 8}},
            "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 128, "ignore_eos": True},
            "data": {"train": {"name": "arithmetic", "count": 100}},
            "verifier": "exact",
            "checkpoint": {"every": 1, "keep": 1, "background": background},
            "logging": {"console": "off", "rollouts": 0},
            "evaluation": {"at_start": False, "at_end": False},
        }
        with GRPOTrainer(config=tree) as trainer:
            timed(trainer.checkpointer, "save", waits)
            timed(trainer.checkpointer.writer, "_write", writes)
            rows = trainer.train()
            size = sum(file.stat().st_size for file in trainer.folder.checkpoints.rglob("*") if file.is_file())
    return {
        "background": background,
        "megabytes": round(size / 1e6),
        "step_seconds": round(statistics.median(row["time/step"] for row in rows), 3),
        "first_wait_seconds": round(waits[0], 3),
        "wait_seconds": round(statistics.median(waits[1:]), 3),
        "write_seconds": round(statistics.median(writes[1:]), 3),
        "wait_share_of_write": round(statistics.median(waits[1:]) / statistics.median(writes[1:]), 3),
        "wait_share_of_step": round(
            statistics.median(waits[1:]) / statistics.median(row["time/step"] for row in rows), 3
        ),
    }


RESUME = """
import sys, time
import rlvr.train, rlvr.trainer, rlvr.distributed.deepspeed
imported = time.process_time()
from rlvr import GRPOTrainer
from rlvr.config.config_loading import load_config
config = load_config(sys.argv[1], sys.argv[2:])
trainer = GRPOTrainer(config=config)
built = time.process_time()
trainer._begin("auto")
began = time.process_time()
print("parts", imported, built - imported, began - built, trainer.step)
"""


def resuming(folder: Path) -> dict[str, Any]:
    """CPU seconds until a resumed quickstart is ready for its next step."""
    config = str(ROOT / "configs" / "quickstart.yaml")
    over = [f"run.dir={folder}", "run.name=quickstart", "run.steps=4", "checkpoint.every=2", "logging.console=off"]
    command = [sys.executable, "-m", "rlvr.train", "--config", config]
    subprocess.run([*command, *over, "evaluation.at_start=false", "evaluation.at_end=false"], check=True)
    parts: list[list[float]] = []
    for _ in range(3):
        found = subprocess.run(
            [sys.executable, "-c", RESUME, config, *over, "evaluation.at_start=false", "evaluation.at_end=false"],
            check=True,
            capture_output=True,
            text=True,
        )
        line = next(line for line in found.stdout.splitlines() if line.startswith("parts"))
        parts.append([float(part) for part in line.split()[1:]])
    imports, build, load, step = (statistics.median(column) for column in zip(*parts, strict=True))
    return {
        "step": int(step),
        "process_start_cpu_seconds": round(imports, 2),
        "build_cpu_seconds": round(build, 2),
        "checkpoint_cpu_seconds": round(load, 2),
        "beyond_process_start_cpu_seconds": round(build + load, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=result_file("machine", "saving", "resuming"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "machine": {
                "cores": torch.get_num_threads(),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "saving": [saving(options.hidden, options.steps, background) for background in (True, False)],
            "resuming": resuming(Path(folder)),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
