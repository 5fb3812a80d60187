"""Compare the peak resident memory of real runs on the CPU with the plan of the dry run.

    python scripts/benchmarks/memory.py [--runs full adapter] [--output memory.json]

Each run is `python -m rlvr.train` for two steps in a process of its own, of a scratch model of over 200 million weights
with the hf engine: one trains all weights, one an adapter. Every completion is as long as it may be, and gets a reward
that varies, so that all of them train. Resident memory is the kernel's peak (ru_maxrss) of that process. Each run is
made once for each of the allocator's settings in `ALLOCATOR`. Needs 8 GB of memory and half an hour on two cores that
are busy with other work too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from result_file import result_file

from rlvr.config import Config
from rlvr.config.stage_plan import stage_plans
from rlvr.planner import own_devices, plan_stage, shape_of

MIB = 1 << 20
VERIFIER = """
def varies(completion: str) -> float:
    return sum(map(ord, completion)) % 7 / 7
"""
COMMON: dict[str, Any] = {
    "data": {"train": {"name": "arithmetic", "count": 40}, "max_prompt_tokens": 32},
    "rollout": {"max_new_tokens": 64, "prompts_per_step": 2, "group_size": 4, "ignore_eos": True},
    "logging": {"console": "off", "rollouts": 0},
    "evaluation": {"at_start": False, "at_end": False},
    # the second step updates while the checkpoint of the first is kept and written
    "checkpoint": {"every": 1},
}
SCRATCH = {"heads": 16, "kv_heads": 4, "context": 512}
RUNS: dict[str, dict[str, Any]] = {
    # 213 million parameters
    "full": {
        "model": {
            "scratch": SCRATCH | {"hidden_size": 1024, "layers": 14, "intermediate_size": 4096},
            "device": "cpu",
            "gradient_checkpointing": False,
        },
        "optim": {"micro_batch_size": 8},
    },
    # 226 million, of which 5 train
    "adapter": {
        "model": {
            "scratch": SCRATCH | {"hidden_size": 1024, "layers": 14, "intermediate_size": 4096, "words": 8000},
            "device": "cpu",
            "adapter": {"r": 16},
            "gradient_checkpointing": False,
        },
    },
}
ALLOCATOR: dict[str, dict[str, str]] = {
    "glibc's defaults": {},
    "trimmed": {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"},
}
"""Environment variables of glibc's malloc."""


def config_of(name: str, folder: Path) -> Config:
    """The configuration of a run whose files are in `folder`."""
    (folder / "verifier.py").write_text(VERIFIER)
    tree = COMMON | RUNS[name]
    scratch = dict(tree["model"]["scratch"])
    scratch["words"] = [f"word{i:05d}" for i in range(scratch.get("words", 0))]
    return Config(
        **tree
        | {
            "model": tree["model"] | {"scratch": scratch},
            "run": {"dir": str(folder / "runs"), "name": name, "steps": 2},
            "verifier": f"{folder / 'verifier.py'}:varies",
        }
    )


def measured(config: Config, folder: Path, environment: dict[str, str]) -> int:
    """Bytes that the run had resident at its peak."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "rlvr.train", "--config", str(path), "run.overwrite=true"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--output", type=result_file("memory_runs"), default=None)
    arguments = parser.parse_args()
    results = []
    for name in arguments.runs:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            config = config_of(name, folder)
            shape = shape_of(config.model)
            (stage,) = stage_plans(config)
            plan = plan_stage(shape, stage, own_devices(config.model), ranks=1)
            row: dict[str, Any] = {
                "run": name,
                "weights": shape.parameters,
                "trained": shape.trained,
                "planned_mib": round(plan.needed / MIB),
                "phase": plan.worst.name,
                "parts_mib": {part: round(size / MIB) for part, size in plan.worst.parts.items()},
                "measured_mib": {},
                "planned_over_measured": {},
            }
            for setting, environment in ALLOCATOR.items():
                peak = measured(config, folder, environment)
                row["measured_mib"][setting] = round(peak / MIB)
                row["planned_over_measured"][setting] = round(plan.needed / peak, 3)
            results.append(row)
            print(json.dumps(row), flush=True)
    if arguments.output is not None:
        command = " ".join(["python", "scripts/benchmarks/memory.py", *sys.argv[1:]])
        text = json.dumps({"command": command, "allocator": ALLOCATOR, "memory_runs": results}, indent=1)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
