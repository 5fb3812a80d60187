"""Measure what a judge's failures add to the wait for a step's verdicts, in times of a reply, with the client alone.

    python scripts/benchmarks/judge_client.py [--latency 3] [--bursts 12] [--output FILE]

64 requests go out at once, as at the end of a step without sampling ahead, to a `StubJudge` that replies, or fails
(5 %), after `--latency` seconds, or never (2 %). An attempt that comes to nothing costs the time of a reply, since
another one has to be made, so no client waits less than the greatest number of such attempts of one request: its mean
is `least`. The times are long, so that the speed of the machine hardly matters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time

from result_file import result_file

from rlvr.testing import StubJudge
from rlvr.verifiers.judge.chat_client import ChatClient

REQUESTS, FAIL, HANG = 64, 0.05, 0.02
BODY = {"messages": [{"role": "system", "content": "Judge."}, {"role": "user", "content": "It is 4."}]}


def least(bad: float) -> float:
    """The mean of the most attempts in vain of one request, where each attempt is with probability `bad`."""
    return sum(1 - (1 - bad**attempts) ** REQUESTS for attempts in range(1, 50))


def waits(options: argparse.Namespace, **faults: float) -> dict:
    """The times of bursts, in times of a reply, after one that fills the client's latencies."""
    times = []
    with StubJudge("yes", delay=options.latency, **faults) as stub:
        client = ChatClient((stub.url,), model="stub")

        async def burst() -> None:
            await asyncio.gather(*(client.ask(BODY) for _ in range(REQUESTS)))

        for _ in range(options.bursts + 1):
            start = time.perf_counter()
            asyncio.run(burst())
            times.append((time.perf_counter() - start) / options.latency)
        counts = {"requests": client.usage.requests, "hedged": client.usage.hedged, "failed": stub.failed}
    return {"mean": statistics.mean(times[1:]), "bursts": times[1:], **counts, "hung": stub.hung}


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=3.0)
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument(
        "--output", type=result_file("command", "added"), default="scripts/benchmarks/judge_client.json"
    )
    options = parser.parse_args()
    clean = waits(options)
    faulty = waits(options, fail=FAIL, hang=HANG)
    result = {
        "command": f"python scripts/benchmarks/judge_client.py --latency {options.latency:g} --bursts {options.bursts}",
        "fail": FAIL,
        "hang": HANG,
        "least": least(FAIL + HANG),
        "added": faulty["mean"] - clean["mean"],
        "clean": clean,
        "faulty": faulty,
        "machine": f"{platform.machine()}, two cores, busy with other work",
    }
    text = json.dumps(result, indent=1)
    options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
