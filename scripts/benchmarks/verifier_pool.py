"""Measure the cost of the verifier pool: medians over repeats, written as JSON.

    python scripts/benchmarks/verifier_pool.py --output scripts/benchmarks/verifier_pool.json

Each figure has its unit in its name; `floor_ms` is the time of the same work without any overhead (two waves of 20 ms
on 32 workers, one wave of asynchronous calls, 64 x 20 ms over the cores). `load` is the machine's load average before
and after: figures of a busy machine cannot be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from result_file import result_file

from rlvr.records import Task, Verdict
from rlvr.verifiers import FunctionVerifier, Needs, Verifier, VerifierPool
from rlvr.verifiers.pool.threads import cores

TASK = Task("t", "p", "4")
STEP, SECONDS = 64, 0.02


def waits(completion):
    time.sleep(SECONDS)
    return 1.0


async def awaits(completion):
    await asyncio.sleep(SECONDS)
    return 1.0


def computes(completion):
    end = time.process_time() + SECONDS
    while time.process_time() < end:
        pass
    return 1.0


def nothing(completion):
    return 1.0


@dataclass
class Hostile(Verifier):
    """Spins or sleeps for ever when told to, otherwise answers at once."""

    time_limit: float = 1.0
    needs: ClassVar[Needs] = Needs(process=True)

    def verify(self, task, completion):
        while completion == "spin":
            pass
        if completion == "sleep":
            time.sleep(1e6)
        return Verdict.from_score(1.0)


def timed(pool, verifier, completions):
    start = time.perf_counter()
    verdicts = pool.verify_many(verifier, [(TASK, completion) for completion in completions])
    return time.perf_counter() - start, verdicts


def steps(pool, function, repeats):
    """Milliseconds of a step of 64 completions on a warm pool."""
    verifier, times = FunctionVerifier(function), []
    for _ in range(repeats + 1):
        seconds, verdicts = timed(pool, verifier, [str(n) for n in range(STEP)])
        assert all(verdict.score == 1.0 for verdict in verdicts)
        times.append(seconds * 1e3)
    return {"first": times[0], "median": statistics.median(times[1:]), "worst": max(times[1:])}


def overhead(pool, jobs):
    """Microseconds per job that does nothing: one after the other on one warm worker, and many at once."""
    verifier = FunctionVerifier(nothing)
    timed(pool, verifier, ["x"] * STEP)
    ones = [timed(pool, verifier, ["x"])[0] for _ in range(jobs)]
    cpu = time.process_time()
    many, _ = timed(pool, verifier, ["x"] * jobs)
    return {
        "one_at_a_time_median": statistics.median(ones) * 1e6,
        "many_at_once": many / jobs * 1e6,
        "many_at_once_trainer_cpu": (time.process_time() - cpu) / jobs * 1e6,
    }


def respawn(repeats):
    """Milliseconds from a job on a fresh worker (the last one was just killed) to its verdict, less the same on a warm
    one."""
    with VerifierPool(workers=1) as pool:
        quick, slow = Hostile(time_limit=5.0), Hostile(time_limit=0.02)
        timed(pool, quick, ["x"])
        timed(pool, slow, ["x"])
        fresh, warm = [], []
        for _ in range(repeats):
            timed(pool, slow, ["sleep"])
            fresh.append(timed(pool, slow, ["x"])[0] * 1e3)
            warm.append(timed(pool, slow, ["x"])[0] * 1e3)
    return {"fresh_median": statistics.median(fresh), "fresh_worst": max(fresh), "warm_median": statistics.median(warm)}


def kills(count):
    """Processes and file descriptors left after so many kills, and what a kill costs beyond its time limit."""
    with VerifierPool(workers=4) as pool:
        verifier = Hostile(time_limit=0.01)
        timed(pool, verifier, ["x"] * 4)
        before = left()
        seconds, verdicts = timed(pool, verifier, ["sleep"] * count)
        assert all(verdict.status == "timeout" for verdict in verdicts)
        timed(pool, verifier, ["x"] * 4)
        time.sleep(0.5)
        after = left()
    closed = left()
    names = ("processes", "file_descriptors")
    return {
        "kills": count,
        "seconds": seconds,
        **{f"{name}_before": value for name, value in zip(names, before, strict=True)},
        **{f"{name}_after": value for name, value in zip(names, after, strict=True)},
        "processes_after_close": closed[0],
    }


def left():
    return len(below("self")), len(os.listdir("/proc/self/fd"))


def below(pid):
    found = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found |= {int(child) for child in (task / "children").read_text().split()}
    except OSError:
        pass
    return found.union(*(below(child) for child in found))


def hostile(repeats):
    """Seconds for 1,000 ordinary and 64 hostile jobs (half spin, half sleep; time limit 0.1 s) on two workers.

    An ordinary job is lost when the machine is so busy that it takes 0.1 s.
    """
    jobs = ["x"] * 1064
    for n in range(64):
        jobs[n * 16] = "spin" if n % 2 else "sleep"
    times, lost = [], 0
    with VerifierPool(workers=2) as pool:
        verifier = Hostile(time_limit=0.1)
        timed(pool, verifier, ["x", "x"])
        for _ in range(repeats):
            seconds, verdicts = timed(pool, verifier, jobs)
            assert all(v.status == "timeout" for v, job in zip(verdicts, jobs, strict=True) if job != "x")
            lost += sum(v.score != 1.0 for v, job in zip(verdicts, jobs, strict=True) if job == "x")
            times.append(seconds)
    return {"median": statistics.median(times), "floor": 64 * 0.1 / 2, "ordinary_jobs_lost_in_all": lost}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output",
        type=result_file("command", "overhead_us", "respawn_ms"),
        help="where the JSON goes; the screen in any case",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kills", type=int, default=1000)
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    with VerifierPool() as pool:
        results = {
            "step_of_64_waiting_20_ms_plain_ms": {"floor_ms": 40.0, **steps(pool, waits, asked.repeats)},
            "step_of_64_waiting_20_ms_async_ms": {"floor_ms": 20.0, **steps(pool, awaits, asked.repeats)},
            "step_of_64_computing_20_ms_ms": {"floor_ms": STEP * 20 / cores(), **steps(pool, computes, asked.repeats)},
            "overhead_us": overhead(pool, 1000),
        }
    results |= {
        "respawn_ms": respawn(asked.repeats),
        "kills": kills(asked.kills),
        "hostile_64_among_1000_s": hostile(3),
    }
    report = {
        "command": " ".join(["python", *sys.argv]),
        "repeats": asked.repeats,
        "cores": cores(),
        "python": platform.python_version(),
        "load": {"before": before, "after": os.getloadavg()[0]},
        **results,
    }
    text = json.dumps(report, indent=2, default=float)
    print(text)
    if asked.output:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
