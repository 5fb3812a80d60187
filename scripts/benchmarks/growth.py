"""Measure how seconds a step and peak memory grow when completions, their length or the vocabulary double.

    python scripts/benchmarks/growth.py [--rounds 3] [--output FILE.json]

One workload of speed.py's kind is doubled three times along each of the three, the others fixed. Each run is a process
of its own with one thread; the sizes take turns, figures are medians over the rounds. Memory is the peak of
the process beyond what it had before the model was loaded. Writes FILE.json and, beside it, FILE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from result_file import result_file
from speed import HERE, run, versions_text
from speed_workloads import Workload, write_model

FORMAT = 1
BASE = Workload(
    "growth: 32 completions of 64 tokens",
    prompts=8,
    group=4,
    new_tokens=64,
    hidden=128,
    vocabulary=4096,
    reward="parity",
    dropped=1,
    counted=3,
)
DOUBLINGS = 3
AXES = {"completions": "group", "tokens": "new_tokens", "vocabulary": "vocabulary"}
"""What doubles -> the field of the workload."""


def sizes() -> dict[str, list[Workload]]:
    """The workloads along each axis, the smallest first."""
    return {
        axis: [replace(BASE, **{field: getattr(BASE, field) * 2**i}) for i in range(DOUBLINGS + 1)]
        for axis, field in AXES.items()
    }


def measure(rounds: int, cores: list[int]) -> dict[str, list[dict[str, Any]]]:
    """For each axis and size: seconds a step and MiB, medians over the rounds."""
    found: dict[Workload, list[dict[str, Any]]] = {one: [] for axis in sizes().values() for one in axis}
    for number in range(rounds):
        for workload, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                write_model(workload, Path(folder))
                runs.append(run("ours", sys.executable, workload, Path(folder), cores))
            print(
                f"round {number + 1}: {workload.group} x {workload.new_tokens}, {workload.vocabulary}: "
                f"{runs[-1]['step_seconds']:.3f}",
                flush=True,
            )
    return {axis: [_row(axis, one, found[one]) for one in of] for axis, of in sizes().items()}


def _row(axis: str, workload: Workload, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "size": getattr(workload, AXES[axis]) * (workload.prompts if axis == "completions" else 1),
        "step_seconds": statistics.median(one["step_seconds"] for one in runs),
        "mib": statistics.median(one["peak_mib"] - one["before_mib"] for one in runs),
        "versions": runs[0]["versions"],
    }


def table(result: dict[str, Any]) -> str:
    """The Markdown page: each size with its ratio to the one before."""
    lines = [
        f"Medians of {result['rounds']} rounds; `{result['command']}`; {result['machine']}; {versions_text(result)}.",
        "",
        "| what doubles | size | s/step | x | MiB beyond the start | x |",
        "|---|---|---|---|---|---|",
    ]
    for axis, rows in result["axes"].items():
        for before, row in zip([None, *rows], rows, strict=False):
            times = [f"{row[key] / before[key]:.2f}" if before else "" for key in ("step_seconds", "mib")]
            lines.append(
                f"| {axis} | {row['size']:,} | {row['step_seconds']:.3f} | {times[0]} | {row['mib']:,.0f} | "
                f"{times[1]} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="cores that every run is pinned to; torch has one thread")
    parser.add_argument(
        "--output", type=result_file("format", "command", "base", "axes", page=True), default=str(HERE / "growth.json")
    )
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: given.cores]
    load = os.getloadavg()[0]
    axes = measure(given.rounds, cores)
    versions = [row.pop("versions") for rows in axes.values() for row in rows]
    result = {
        "format": FORMAT,
        "command": f"python scripts/benchmarks/growth.py --rounds {given.rounds} --cores {given.cores}",
        "machine": f"{platform.machine()}, {len(cores)} cores, one thread, Python {platform.python_version()}",
        "load_before": load,
        "versions": versions[0],
        "rounds": given.rounds,
        "base": asdict(BASE),
        "axes": axes,
    }
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    given.output.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
