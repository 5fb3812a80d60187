"""Compare a run whose judge fails on 5 % of its requests and hangs on 2 % with one whose judge does neither.

    python scripts/benchmarks/judge.py [--output scripts/benchmarks/judge.json]
    python scripts/benchmarks/judge.py --latency 0.2 --update 6 --steps 8 \\
        --output scripts/benchmarks/judge_short_steps.json

The judge is `rlvr.testing.StubJudge`, a server in a process of its own that replies, or fails, after `--latency`
seconds; a request that hangs gets no reply at all. Sampling is real, and an update takes `--update` seconds, most of
which the trainer waits. The runs are made in turns, with and without sampling ahead of training (rollout.staleness 1,
0). The added waiting is the difference of `time/verify`, the seconds in which only verdicts were missing, as a share of
the step without faults; medians could hide a step that waits, so means over all steps are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from multiprocessing.connection import Connection

import torch
from result_file import result_file

from rlvr import GRPOTrainer
from rlvr.testing import StubJudge, StubRequest

FAIL, HANG = 0.05, 0.02
TREE = {
    "model": {"scratch": {"context": 256, "hidden_size": 64, "layers": 2}, "device": "cpu"},
    "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 48, "ignore_eos": True},
    "data": {"train": {"name": "arithmetic", "count": 500}},
    "logging": {"console": "off", "rollouts": 0},
    "evaluation": {"at_start": False, "at_end": False},
}


def answer(request: StubRequest) -> str:
    """A verdict that varies: whether the response has an even number of digits."""
    return request.verdict("yes" if sum(c.isdigit() for c in request.fenced["response"]) % 2 == 0 else "no")


def serve(pipe: Connection, latency: float, shares: dict[str, float]) -> None:
    """Serve a judge until the other end of the pipe asks for what came."""
    with StubJudge(answer, delay=latency, **shares) as stub:
        pipe.send(stub.url)
        pipe.recv()
        pipe.send({"requests": len(stub.requests), "failed": stub.failed, "hung": stub.hung})


def run(faulty: bool, staleness: int, options: argparse.Namespace) -> dict:
    """The figures of one run."""
    shares = {"fail": FAIL, "hang": HANG} if faulty else {}
    processes = multiprocessing.get_context("spawn")
    pipe, other = processes.Pipe()
    judge = processes.Process(target=serve, args=(other, options.latency, shares), daemon=True)
    judge.start()
    with tempfile.TemporaryDirectory() as folder:
        tree = {**TREE, "run": {"dir": folder, "steps": options.steps}}
        tree["rollout"] = {**TREE["rollout"], "staleness": staleness}
        tree["verifier"] = {"name": "judge", "urls": pipe.recv(), "model": "stub"}
        with GRPOTrainer(config=tree) as trainer:
            update = trainer.training.learner.update

            def slow(*arguments: object) -> object:
                start = time.perf_counter()
                result = update(*arguments)
                time.sleep(max(0.0, options.update - (time.perf_counter() - start)))
                return result

            trainer.training.learner.update = slow
            rows = trainer.train()
        pipe.send("end")
        return {
            "steps": sum(row["tokens/trained"] > 0 for row in rows),
            "undecided": sum(row["verifier/JudgeVerifier/undecided"] for row in rows),
            **pipe.recv(),
            "seconds_a_step": statistics.mean(row["time/step"] for row in rows),
            "waiting_a_step": statistics.mean(row["time/verify"] for row in rows),
        }


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--update", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--output", type=result_file("command", "added_waiting"), default="scripts/benchmarks/judge.json"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = {}
    added = {}
    for staleness in (0, 1):
        clean, faulty = (run(bad, staleness, options) for bad in (False, True))
        rounds[f"staleness_{staleness}"] = {"clean": clean, "faulty": faulty}
        added[f"staleness_{staleness}"] = (faulty["waiting_a_step"] - clean["waiting_a_step"]) / clean["seconds_a_step"]
    result = {
        "command": f"python scripts/benchmarks/judge.py --latency {options.latency:g} --update {options.update:g} "
        f"--steps {options.steps}",
        "fail": FAIL,
        "hang": HANG,
        "added_waiting": added,
        "runs": rounds,
        "torch": version("torch"),
        "machine": f"{platform.machine()}, 1 thread for the trainer",
    }
    text = json.dumps(result, indent=1)
    options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
