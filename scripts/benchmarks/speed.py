"""Compare seconds a step and peak memory of rlvr and of TRL on six workloads.

    python scripts/benchmarks/speed.py [--trl-python ENVIRONMENT/bin/python] [--rounds 5] [--only W1 W4]
        [--output FILE.json]

Each round runs every workload once with each side, in turns; each run is a process of its own on the same model files,
with one thread, pinned to the same cores. Its figure is the median of its steps after the first few; the table shows
medians over the rounds and the median of the rounds' ratios. Without --trl-python only our side runs. Writes FILE.json
and, beside it, FILE.md. TRL needs an environment of its own: python -m venv DIR, then pip install torch==2.13.0
trl==1.16.0 transformers==5.19.0 there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from result_file import result_file
from speed_workloads import WORKLOADS, Workload, write_model

FORMAT = 1
"""Of the JSON file; a change of what a figure means is a new number."""
HERE = Path(__file__).parent
OUTPUT = HERE / "speed.json"
SIDES = {"ours": "ours_side.py", "trl": "trl_side.py"}
DEADLINE = 900.0
"""Seconds that one run may take."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(
    script: Path, python: str, workload: Workload, model: Path, cores: list[int], source: Path | None = None
) -> dict[str, Any]:
    """One run of one side's script, in a process of its own; RuntimeError with the end of its output where it fails.
    `source` is the folder of the library that it imports, where that is not the installed one."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [python, str(script), json.dumps(asdict(workload)), str(model), str(result)],
            env={**os.environ, **ONE_THREAD, **QUIET, **({"PYTHONPATH": str(source)} if source else {})},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            timeout=DEADLINE,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"{script} failed on {workload.text}:\n{(done.stdout + done.stderr)[-3000:]}")
        return json.loads(result.read_text())


def measure(name: str, pythons: dict[str, str], rounds: int, cores: list[int]) -> dict[str, Any]:
    """All rounds of one workload. The side that begins changes from round to round."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(WORKLOADS[name], Path(folder))
        done: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
        for number in range(rounds):
            for side in sorted(pythons, reverse=bool(number % 2)):
                done[side].append(run(HERE / SIDES[side], pythons[side], WORKLOADS[name], Path(folder), cores))
                print(f"{name} round {number + 1} {side}: {done[side][-1]['step_seconds']:.4f} s a step", flush=True)
    return {"settings": asdict(WORKLOADS[name]), "parameters": parameters, "rounds": done}


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of one side's rounds: seconds a step, tokens a step, peak memory, and seconds of each phase."""
    of = ("step_seconds", "tokens_per_step", "peak_mib")
    found = {key: statistics.median(one[key] for one in rounds) for key in of}
    phases = {
        name: statistics.median(one["phase_seconds"][name] for one in rounds) for name in rounds[0]["phase_seconds"]
    }
    return {**found, **phases}


def ratio(found: dict[str, Any], key: str = "step_seconds") -> float | None:
    """TRL over ours: the median of the rounds' ratios; None without TRL."""
    ours, trl = found["rounds"]["ours"], found["rounds"].get("trl")
    return None if not trl else statistics.median(t[key] / o[key] for o, t in zip(ours, trl, strict=True))


def table(result: dict[str, Any]) -> str:
    """The Markdown page of a result: seconds a step, work, memory, and where the time goes."""
    head = (
        "| workload | ours s/step | TRL s/step | TRL / ours | ours tokens/step | TRL tokens/step | ours peak MiB | "
        "TRL peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    )
    phases = (
        "| workload | side | sampling | waiting for verdicts | update | everything |",
        "|---|---|---|---|---|---|",
    )
    rows, parts = [], []
    for name, found in result["workloads"].items():
        sides = {side: medians(rounds) for side, rounds in found["rounds"].items()}
        cells = [f"{name}: {found['settings']['text']}"]
        for key, digits in (("step_seconds", 4), ("tokens_per_step", 0), ("peak_mib", 0)):
            cells += [f"{sides[side][key]:,.{digits}f}" if side in sides else "-" for side in SIDES]
            if key == "step_seconds":
                faster = ratio(found)
                cells.append("-" if faster is None else f"{faster:.2f}")
        rows.append("| " + " | ".join(cells) + " |")
        parts += [
            f"| {name} | {side} | {m['rollout']:.4f} | {m['verify']:.4f} | {m['update']:.4f} | "
            f"{m['step_seconds']:.4f} |"
            for side, m in sides.items()
        ]
    say = f"Medians of {result['rounds']} rounds; `{result['command']}`; {result['machine']}; {versions_text(result)}."
    return "\n".join([say, "", *head, *rows, "", "Seconds a step by phase:", "", *phases, *parts, ""])


def versions_text(result: dict[str, Any]) -> str:
    """The versions of a result in words."""
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="the Python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2, help="cores that every run is pinned to; torch has one thread")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--output", type=result_file("format", "command", "workloads", page=True), default=str(OUTPUT))
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: given.cores]
    pythons = {"ours": sys.executable} | ({"trl": given.trl_python} if given.trl_python else {})
    load = os.getloadavg()[0]
    workloads = {name: measure(name, pythons, given.rounds, cores) for name in given.only}
    rounds = next(iter(workloads.values()))["rounds"]
    result = {
        "format": FORMAT,
        # The environment's place is the machine's own business.
        "command": " ".join(
            ["python", "scripts/benchmarks/speed.py"]
            + ["--trl-python PYTHON"] * ("trl" in pythons)
            + [f"--rounds {given.rounds}", f"--cores {given.cores}"]
            + [f"--only {' '.join(workloads)}"] * (list(workloads) != list(WORKLOADS))
        ),
        "machine": f"{platform.machine()}, {len(cores)} cores, one thread, Python {platform.python_version()}",
        "load_before": load,
        "versions": {k: v for side in rounds.values() for k, v in side[0]["versions"].items()},
        "rounds": given.rounds,
        "workloads": {
            name: {**found, "ratio": ratio(found), "memory_ratio": ratio(found, "peak_mib")}
            for name, found in workloads.items()
        },
    }
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    given.output.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
