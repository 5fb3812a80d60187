"""Compare the library of another checkout with this one's: seconds a step of the six workloads of speed.py, in turns.

    python scripts/benchmarks/before_after.py CHECKOUT [--rounds 5] [--only W1 W4] [--output FILE.json]

Each round runs every workload once with each library, each run in a process of its own with one thread on the same
model files. The ratio is this checkout's seconds a step over the other's: the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_file import result_file
from speed import HERE, SIDES, run
from speed_workloads import WORKLOADS, write_model

FORMAT = 1
"""Of the JSON file; a change of what a figure means is a new number."""


def measure(name: str, checkouts: dict[str, Path], rounds: int, cores: list[int]) -> dict[str, Any]:
    """Seconds a step of each round, and their ratio. The library that begins changes from round to round."""
    seconds: dict[str, list[float]] = {side: [] for side in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        write_model(WORKLOADS[name], Path(folder))
        for number in range(rounds):
            for side in sorted(checkouts, reverse=bool(number % 2)):
                script = checkouts[side] / "scripts" / "benchmarks" / SIDES["ours"]
                done = run(script, sys.executable, WORKLOADS[name], Path(folder), cores, checkouts[side] / "src")
                seconds[side].append(done["step_seconds"])
    ratios = [after / before for after, before in zip(seconds["after"], seconds["before"], strict=True)]
    print(f"{name}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)
    return {"step_seconds": seconds, "ratio": statistics.median(ratios)}


def commit(checkout: Path) -> str:
    """The commit of a checkout."""
    return subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of the library as it was before")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--output", type=result_file("format", "command", "commits"), required=False)
    given = parser.parse_args()
    checkouts = {"before": given.checkout.resolve(), "after": HERE.parents[1]}
    cores = sorted(os.sched_getaffinity(0))[:2]
    result = {
        "format": FORMAT,
        "command": f"python scripts/benchmarks/before_after.py CHECKOUT --rounds {given.rounds}",
        "commits": {side: commit(checkout) for side, checkout in checkouts.items()},
        "load_before": os.getloadavg()[0],
        "ratios": {name: measure(name, checkouts, given.rounds, cores) for name in given.only},
    }
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
