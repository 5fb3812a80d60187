"""Measure the sandbox for programs: runs a second, start-up overhead, the runs of a training step, and what remains
afterwards.

    python scripts/benchmarks/code_sandbox.py [--runs 5000] [--workers 2] > scripts/benchmarks/code_sandbox.json

`python` is the time of a bare `python -I -S` on the same machine in the same minute, interleaved: on a busy machine
only the ratio to it can be compared. Counts do not change on a busy machine:
`perf stat -e page-faults,raw_syscalls:sys_enter` before the command counts those of all processes, the trainer's and
the sandbox's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time

import numpy as np

from rlvr.verifiers.code.runner import Job
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.tiers import TIERS

TRIVIAL = Job("print(1)")


async def latency(runner: LocalRunner, count: int = 200) -> dict[str, float]:
    """Milliseconds of one run at a time, and of a bare interpreter beside it."""
    sandbox, bare = [], []
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", "print(1)"]
    for _ in range(count):
        start = time.perf_counter()
        assert (await runner.run(TRIVIAL)).stdout == b"1\n"
        middle = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        sandbox.append(1000 * (middle - start))
        bare.append(1000 * (time.perf_counter() - middle))
    names = {"median_ms": 50, "p95_ms": 95}
    return {f"{who}_{name}": round(float(np.percentile(times, at)), 2)
            for who, times in (("sandbox", sandbox), ("python", bare)) for name, at in names.items()}  # fmt: skip


async def rate(runner: LocalRunner, count: int) -> float:
    """Seconds of `count` runs, all asked for at once."""
    start = time.perf_counter()
    outcomes = await asyncio.gather(*(runner.run(Job(f"print({i})")) for i in range(count)))
    assert [outcome.stdout for outcome in outcomes] == [b"%d\n" % i for i in range(count)]
    return time.perf_counter() - start


def left() -> dict[str, int]:
    """What this process holds and sees: file descriptors, processes, mounts, files in /tmp."""
    with open("/proc/self/mounts") as mounts:
        lines = len(mounts.readlines())
    processes = len([name for name in os.listdir("/proc") if name.isdigit() and _is_ours(name)])
    return {"descriptors": len(os.listdir("/proc/self/fd")), "processes": processes, "mounts": lines,
            "files": len([name for name in os.listdir("/tmp") if name.startswith("rlvr-code-")])}  # fmt: skip


def _is_ours(pid: str) -> bool:
    """Whether a process is a zygote's, by its arguments or by being below bubblewrap."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"sandbox.inside.zygote" in file.read() and _leader(int(pid))
    except OSError:
        return False


def _leader(pid: int) -> bool:
    """Whether a process descends from this one."""
    while pid > 1:
        if pid == os.getpid():
            return True
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return False


async def measure(runs: int, workers: int) -> dict[str, object]:
    """All figures."""
    before = left()
    runner = LocalRunner(TIERS[0], workers)
    await rate(runner, 4 * workers)
    figures: dict[str, object] = {"cores": os.cpu_count(), "workers": workers, "load": os.getloadavg()[0]}
    figures |= await latency(runner)
    figures["runs_per_second"] = round(400 / await rate(runner, 400), 1)
    figures["step_of_64_x_10_seconds"] = round(await rate(runner, 640), 2)
    seconds = sum([await rate(runner, 100) for _ in range(runs // 100)])
    figures["long_run"] = {"runs": runs, "runs_per_second": round(runs / seconds, 1) if runs else None}
    await runner.close()
    await asyncio.sleep(0.5)
    figures["left"] = {name: value - before[name] for name, value in left().items()}
    return figures


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.runs, options.workers)), indent=2))


if __name__ == "__main__":
    main()
