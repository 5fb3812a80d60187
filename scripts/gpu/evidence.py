"""Collect evidence from a GPU in minutes: the stages of scripts/gpu/stages, each in a process of its own with a limit.

    python scripts/gpu/evidence.py --out FOLDER [--stages 1-7] [--minutes 35 | --minutes 1=3,6=12] [--device cuda|cpu]
    python scripts/gpu/evidence.py --write-docs FOLDER
    python scripts/gpu/evidence.py --write-speeds FOLDER

Each stage ends in exactly one JSON line, printed and appended to FOLDER/evidence.jsonl, whether it succeeded, failed,
took too long or was skipped; the next one follows. FOLDER/output.log has the output of the stages. Two files, both only
appended to, so that stages can be run in several calls. This file needs only Python's standard library.

Exit codes: 0 no stage failed, 1 one failed or took too long, 2 bad input, 128 + signal when it was stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence_page import write_page
from evidence_speeds import write_speeds
from stage_process import Outcome, adopt_orphans, run_limited

from stages import STAGES, Stage

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EVIDENCE = "evidence.jsonl"
SPEEDS = "src/rlvr/policy/attention_speeds.json"
OUTPUT = "output.log"
RESERVE = 0.05
"""Share of a stage's limit that is left for it to end by itself."""
KEPT_OUTPUT = 1 << 20
"""Bytes of a stage's output that are kept, the last ones."""
LEAST_SECONDS = 5.0
"""Of what is left of the minutes for all stages: a stage with less would be killed while it imports torch."""
LAST_LINES = 6
"""Lines of the output that go with a stage that died."""


class Stop:
    """The signal that was sent to this process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._keep)

    def __bool__(self) -> bool:
        return self.signal is not None

    def _keep(self, number: int, frame: Any) -> None:
        self.signal = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description="Evidence from a GPU: time-boxed stages, one JSON line each.")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where evidence.jsonl and output.log go")
    parser.add_argument("--stages", type=chosen_stages, default=list(STAGES), metavar="1-7", help="such as 1-4 or 2,6")
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=None,
        metavar="N|1=3,6=12",
        help="for all stages, shared out by their weights, or for single ones; default: each has its own",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: every stage at the size of a test"
    )
    parser.add_argument(
        "--write-docs", type=Path, metavar="FOLDER", help="write docs/gpu.md's tables from its evidence.jsonl"
    )
    parser.add_argument(
        "--write-speeds",
        type=Path,
        metavar="FOLDER",
        help="put the constants of attention of its evidence.jsonl into the file that the library's cost model reads",
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs/gpu.md", help=argparse.SUPPRESS)
    parser.add_argument("--speeds", type=Path, default=ROOT / SPEEDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if sum(given is not None for given in (options.out, options.write_docs, options.write_speeds)) != 1:
        parser.error(
            "give --out FOLDER to run stages, or --write-docs FOLDER or --write-speeds FOLDER to write the page or the "
            "constants from what was run"
        )
    if options.out is None:
        return write_from_evidence(parser, options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    adopt_orphans()
    return run_stages(options.stages, options.minutes, options.device, options.out)


def write_from_evidence(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Write the page or the constants; the exit code."""
    given = "--write-docs" if options.write_docs else "--write-speeds"
    folder = options.write_docs or options.write_speeds
    evidence = folder / EVIDENCE
    if not evidence.is_file():  # what the page has would be replaced by nothing
        parser.error(f"{given}: there is no {evidence}: give the FOLDER that was the --out of a run")
    try:
        if options.write_docs:
            write_page(options.page, evidence)
        else:
            gpus = write_speeds(options.speeds, evidence)
            print(json.dumps({"file": str(options.speeds), "gpus": gpus}))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def chosen_stages(text: str) -> list[Stage]:
    """The stages of a list of numbers and ranges, in their order."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise argparse.ArgumentTypeError(f"{part!r} is no stage and no range of stages: write 1-7 or 2,6")
        numbers |= set(range(int(first), int(last or first) + 1))
    known = {stage.number for stage in STAGES}
    if not numbers or not numbers <= known:
        raise argparse.ArgumentTypeError(f"{text!r}: there are the stages {min(known)} to {max(known)}")
    return [stage for stage in STAGES if stage.number in numbers]


def minutes(text: str) -> float | dict[int, float]:
    """A number for all stages, or one for each of some."""
    try:
        if "=" not in text:
            found: Any = float(text)
            values = [found]
        else:
            pairs = [part.split("=") for part in text.split(",")]
            found = {int(number): float(value) for number, value in pairs}
            values = list(found.values())
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a number of minutes, or 1=3,6=12 for single stages"
        ) from error
    if not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: minutes are above 0")
    return found


def run_stages(stages: Sequence[Stage], given: float | Mapping[int, float] | None, device: str, out: Path) -> int:
    """Run stages one after the other; the exit code."""
    stop = Stop()
    failed = False
    budget = given if isinstance(given, float) else None
    own = given if isinstance(given, Mapping) else {}
    start = time.monotonic()
    for number, stage in enumerate(stages):
        if budget is None:
            limit = 60 * own.get(stage.number, stage.minutes)
        else:  # what earlier stages did not use goes to later ones
            left = max(0.0, 60 * budget - (time.monotonic() - start))
            limit = left * stage.minutes / sum(later.minutes for later in stages[number:])
        used_up = budget is not None and limit < LEAST_SECONDS
        reason = f"the {budget:g} minutes were used up before it began" if used_up else None
        line = run_stage(stage, device, limit, out, stop, reason)
        failed = failed or line["status"] in ("failed", "timeout")
        text = json.dumps(line)
        with (out / EVIDENCE).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)
    if stop.signal is not None:
        return 128 + stop.signal
    return 1 if failed else 0


def run_stage(
    stage: Stage, device: str, limit: float, out: Path, stop: Stop, skipped: str | None = None
) -> dict[str, Any]:
    """The JSON line of a stage. It is not run where there is a reason to skip it."""
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = {"stage": stage.number, "name": stage.name, "asked_device": device, "begun": begun}
    line |= {"limit_seconds": round(limit, 1)}
    if stop:
        skipped = f"stopped by {_name(stop)} before it began"
    if skipped is not None:
        return line | {"status": "skipped", "reason": skipped, "seconds": 0.0}
    # in the folder of the evidence, so that what a stage had is there even where this process is killed
    with tempfile.TemporaryDirectory(prefix=f"stage-{stage.number}-", dir=out) as folder:
        results, output = Path(folder) / "results.jsonl", Path(folder) / OUTPUT
        results.touch()
        command = [sys.executable, "-m", "stages", str(stage.number), "--device", device]
        command += ["--until", str(time.time() + limit * (1 - RESERVE)), "--results", str(results)]
        outcome = run_limited(
            command, environment(), output, limit, lambda: bool(stop), lambda: read_results(results).ended
        )
        printed = output.read_bytes()[-KEPT_OUTPUT:]
        with (out / OUTPUT).open("ab") as log:
            log.write(f"===== stage {stage.number} ({stage.name}), {begun}\n".encode() + printed + b"\n")
        found = read_results(results)
    return (
        line | {"seconds": round(outcome.seconds, 1)} | verdict(found, outcome, stop, limit, printed) | found.fields()
    )


def environment() -> dict[str, str]:
    """The stage's: this checkout is importable, whether or not it is installed; models are never looked for on a
    hub."""
    # absolute, because tests and engines are started in other folders
    given = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [str(HERE), str(ROOT / "src"), *given]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


class Results:
    """What a stage wrote, line by line; lines that are no JSON (it was killed in the middle of one) are left out."""

    def __init__(self) -> None:
        self.machine: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.failures: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        self.skipped: str | None = None
        self.ended = False

    def add(self, line: Any) -> None:
        """Take a line. KeyError and TypeError where it is not one of a stage's."""
        kind = line["kind"]
        if kind == "result":
            self.results[line["name"]] = line["value"]
        elif kind == "failure":
            self.failures.append({key: line[key] for key in ("name", "error", "traceback")})
        elif kind == "left out":
            self.left_out[line["name"]] = line["reason"]
        elif kind == "machine":
            self.machine = {"device": line["device"], "versions": line["versions"]}
        elif kind == "skip":
            self.skipped = line["reason"]
        elif kind == "end":
            self.ended = True

    def fields(self) -> dict[str, Any]:
        """Of the JSON line."""
        machine = self.machine or {"device": None, "versions": {}}
        return machine | {"results": self.results, "failures": self.failures, "left_out": self.left_out}


def read_results(path: Path) -> Results:
    """What is in a stage's file of results."""
    found = Results()
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.add(json.loads(text))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def verdict(found: Results, outcome: Outcome, stop: Stop, limit: float, printed: bytes) -> dict[str, Any]:
    """The status of a stage and its reason."""
    last = printed.decode(errors="replace").replace(f"{ROOT}/", "").strip().splitlines()[-LAST_LINES:]
    if outcome.timed_out:
        return {"status": "timeout", "reason": f"killed after its limit of {limit:.0f} s", "last_output": last}
    if stop and not found.ended:
        return {"status": "failed", "reason": f"stopped by {_name(stop)}"}
    if found.failures:
        count = len(found.failures)
        first = found.failures[0]
        return {"status": "failed", "reason": f"{count} failed, the first of them {first['name']}: {first['error']}"}
    if found.skipped is not None:
        return {"status": "skipped", "reason": found.skipped}
    if outcome.lingered:
        return {"status": "failed", "reason": "its work was done, and its process did not exit", "last_output": last}
    if outcome.code or not found.ended:
        reason = f"the process ended with {_ending(outcome.code or 0)}"
        return {"status": "failed", "reason": reason, "last_output": last}
    return {"status": "ok", "reason": None}


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _name(stop: Stop) -> str:
    return signal.Signals(stop.signal or 0).name


if __name__ == "__main__":
    sys.exit(main())
