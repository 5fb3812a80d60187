"""Compare the library of another checkout with this one's: seconds a step of the six workloads of speed.py, in turns.

    python scripts/benchmarks/before_after.py CHECKOUT [--only W1 W4] [--output FILE.json]

Two runs of a workload, one with each library, share a core and take steps in turns: while one takes a step the other
waits. So what else the machine does meets both alike, and the ratio of a pair of steps (this checkout's seconds over
the other's) hardly depends on it. A figure is the median over pairs, with the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from result_file import result_file
from speed import DEADLINE, HERE, ONE_THREAD, QUIET
from speed_workloads import WORKLOADS, Workload, write_model

FORMAT = 2
"""Of the JSON file; a change of what a figure means is a new number."""
PAIRS = {"W1": 60, "W2": 40, "W3": 40, "W4": 10, "W5": 40, "W6": 60}
"""Pairs of steps that are counted, after three that are not."""
DROPPED = 3


def start(
    workload: Workload, model: Path, result: Path, source: Path, turn: int, other: int, core: int
) -> subprocess.Popen[bytes]:
    """A run with the library in `source`, whose turn is told by the pipe `turn` and passed on by `other`."""
    command = [sys.executable, str(HERE / "turns_side.py"), json.dumps(asdict(workload)), str(model), str(result)]
    return subprocess.Popen(
        [*command, str(turn), str(other)],
        env={**os.environ, **ONE_THREAD, **QUIET, "PYTHONPATH": str(source)},
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
        pass_fds=(turn, other),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def measure(name: str, checkouts: dict[str, Path], core: int) -> dict[str, Any]:
    """Seconds of each pair of steps, and the ratios' median and quartiles. RuntimeError with the end of the output of a
    run that fails."""
    # One step before the first turn, which begins the others.
    workload = replace(WORKLOADS[name], dropped=1 + DROPPED, counted=PAIRS[name])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(workload, model)
        pipes = [os.pipe(), os.pipe()]
        runs = {
            side: start(workload, model, Path(folder) / side, checkout / "src", pipes[one][0], pipes[1 - one][1], core)
            for one, (side, checkout) in enumerate(checkouts.items())
        }
        os.write(pipes[0][1], b"x")
        # Only the runs hold them now, so that one does not wait for the turn of one that has failed.
        for end in (*pipes[0], *pipes[1]):
            os.close(end)
        try:
            outputs = {side: process.communicate(timeout=DEADLINE)[1] for side, process in runs.items()}
        finally:
            for process in runs.values():
                process.kill()
        failed = [f"{checkouts[side]}:\n{outputs[side].decode()[-3000:]}" for side, p in runs.items() if p.returncode]
        if failed:
            raise RuntimeError(f"{name} failed with " + "\nand with ".join(failed))
        seconds = {side: json.loads((Path(folder) / side).read_text())[DROPPED:] for side in runs}
    ratios = [after / before for before, after in zip(seconds["before"], seconds["after"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{name}: {middle:.3f} (half of {len(ratios)} pairs from {low:.3f} to {high:.3f})", flush=True)
    return {
        "ratio": middle,
        "quartiles": [low, high],
        "pairs": len(ratios),
        "step_seconds": {side: statistics.median(values) for side, values in seconds.items()},
    }


def commit(checkout: Path) -> str:
    """The commit of a checkout."""
    return subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of the library as it was before")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--output", type=result_file("format", "command", "commits"), required=False)
    given = parser.parse_args()
    checkouts = {"before": given.checkout.resolve(), "after": HERE.parents[1]}
    core = max(os.sched_getaffinity(0))
    result = {
        "format": FORMAT,
        "command": "python scripts/benchmarks/before_after.py CHECKOUT",
        "commits": {side: commit(checkout) for side, checkout in checkouts.items()},
        "load_before": os.getloadavg()[0],
        "ratios": {name: measure(name, checkouts, core) for name in given.only},
    }
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
