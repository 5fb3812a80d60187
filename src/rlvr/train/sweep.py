"""One configuration with several seeds (`run.seeds`): a run for each, one after the other, and what they amount to
together.

Invariants:
- Each seed is an ordinary run in `NAME/seed-N`, trained by a process of its own, which can be resumed and looked at by
  itself.
- A seed that fails costs itself. A request to stop goes to the run under way, which saves itself; no further seed is
  begun.
- No run outlives the sweep.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlvr.config import Config
from rlvr.core.own_files import check_output, is_run_config, is_verbatim
from rlvr.core.process import child_process
from rlvr.core.waits import StopRequest, reporting
from rlvr.errors import ConfigError, DataError
from rlvr.evaluation import over_runs, read_result
from rlvr.evaluation.result import means
from rlvr.monitor.console import Console
from rlvr.monitor.trackers import MetricsFile
from rlvr.monitor.whole_file import write_whole
from rlvr.report import write_report

ENDS = ("reward/mean", "completion/length_mean", "entropy")
"""Metrics of the last step that the table shows beside the evaluation's results."""
SUMMARY = "seeds.json"


def of_seed(config: Config, seed: int) -> Config:
    """The configuration of the run of one seed."""
    # `NAME/seed-N`; without `seeds`, so that the run of one seed is an ordinary run.
    run = {"dir": str(config.folder), "name": f"seed-{seed}", "seed": seed, "seeds": []}
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def sweep(config: Config, resume: str | None = None) -> int:
    """Train every seed of `config.run.seeds`, then write seeds.json and report.html; the exit code.

    0 where all seeds are done, 128 + N after signal N, else 2 where each one was refused, else 1. With `resume` auto,
    runs go on where they are, and those that are done are left alone. ConfigError for what a sweep cannot do.
    """
    # Each seed is a process that the sweep starts by itself; under torchrun every rank would start one.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "run.seeds starts runs of one process; under torchrun, start a run for each seed with run.seed"
        )
    if resume not in (None, "auto"):
        raise ConfigError(f"run.seeds resumes all of its runs: --resume auto, not {resume}")
    # The live view of a run draws over its lines; here several runs write one after the other.
    console = Console("plain" if config.logging.console == "auto" else config.logging.console)
    codes = {}
    _refuse_foreign(config)
    config.folder.mkdir(parents=True, exist_ok=True)
    doing = f"seeds of {config.folder}, process {os.getpid()}: each is trained in a process of its own, which says more"
    with StopRequest() as stop, reporting(lambda: doing):
        for number, seed in enumerate(config.run.seeds, start=1):
            console.message(f"seed {seed} ({number} of {len(config.run.seeds)}): {config.folder / f'seed-{seed}'}")
            codes[seed] = _train(of_seed(config, seed), resume, stop)
            # The exit code of the run that was stopped is not a failure of its seed.
            if stop:
                break
            if codes[seed]:
                console.message(f"seed {seed} ended with exit code {codes[seed]}; the others go on", "error")
    if stop.signal is not None:
        console.message("stopped; --resume auto goes on", "warning")
        return 128 + int(stop.signal)
    done = [seed for seed, code in codes.items() if code == 0]
    if done:
        _conclude(config, done, console)
    if len(done) < len(codes):
        # Every run refused the same configuration: bad input of the sweep.
        if not done and set(codes.values()) == {2}:
            return 2
        return 1
    return 0


def _refuse_foreign(config: Config) -> None:
    """ConfigError where a file of the user's has the name of one that the sweep writes."""
    for seed in config.run.seeds:
        path = config.folder / f"seed-{seed}.yaml"
        if path.exists() and not (is_run_config(path) and is_verbatim(path)):
            raise ConfigError(f"{path} exists and is not as a sweep writes it: choose another run.name")
    check_output(
        config.folder / SUMMARY, lambda head: head.startswith('{\n "version": 1,\n "seeds": ['), "a summary of seeds"
    )


def _train(config: Config, resume: str | None, stop: StopRequest) -> int:
    """The exit code of one run."""
    path = config.folder.parent / f"{config.run.name}.yaml"
    write_whole(path, yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True))
    # A file and not arguments: the configuration may hold anything, and the command line is limited.
    arguments = ["--config", str(path), *(["--resume", resume] if resume else [])]
    # In a session of its own, where a Ctrl-C in the terminal does not reach it: the sweep hands the signal on once. A
    # run that got it twice would stop at once.
    process = child_process.start("rlvr.train", arguments, {})
    forwarded = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # In short waits, since a signal handler only sets `stop`: five times a second is soon enough for a
                # person.
                return process.wait(0.2)
            if stop.signal is not None and not forwarded:
                forwarded = True
                process.send_signal(stop.signal)
    finally:
        # Also after an ordinary end: nothing of its group, such as a server of vLLM, outlives the run.
        child_process.kill(process)


def _conclude(config: Config, seeds: Sequence[int], console: Console) -> None:
    """Write the summary of the finished runs: a table, seeds.json and the report."""
    folders = [config.folder / f"seed-{seed}" for seed in seeds]
    results = dict(_results(config, folders))
    text = json.dumps({"version": 1, "seeds": list(seeds), "results": results}, indent=1)
    write_whole(config.folder / SUMMARY, text + "\n")
    columns = ["", "mean", "95 %", "IQM", "95 %", *(f"seed {seed}" for seed in seeds)]
    rows = [
        [name, r["mean"], _range(r["interval"]), r["iqm"], _range(r["iqm interval"]), *r["runs"]]
        for name, r in results.items()
    ]
    console.table(f"after the last step, {len(seeds)} seeds", columns, rows)
    try:
        console.message(f"report: {write_report(folders, config.folder / 'report.html')} (open it in a browser)")
    except Exception as error:  # the runs are done and saved; no fault of their report may make them look failed
        console.message(f"the report could not be written: {type(error).__name__}: {error}", "warning")
    console.closing(f"done: seeds {', '.join(map(str, seeds))}, run folder {config.folder}")


def _results(config: Config, folders: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Result -> mean and interquartile mean with intervals, and the value of each run, after its last step."""
    last = [sorted((folder / "evaluations").glob("step-*.json")) for folder in folders]
    if all(last):
        # Runs that evaluated on different tasks, or were written by another version.
        with contextlib.suppress(DataError):
            # The newest file of each run. Six digits (`step-000100`) make the order of names that of steps.
            task_results = [read_result(files[-1]) for files in last]
            for name, summary in over_runs(task_results, config.evaluation.k).items():
                yield f"eval/{name}", summary
    ends = [list(MetricsFile(folder / "metrics.jsonl").rows())[-1:] for folder in folders]
    for name in ENDS:
        present = [row[0][name] for row in ends if row and row[0].get(name) is not None]
        values = np.asarray(present, dtype=np.float64)
        # A mean over some of the seeds would be compared with one over all.
        if len(values) == len(folders):
            yield name, means(values) | {"runs": values.tolist()}


def _range(low_high: Sequence[float] | None) -> str:
    if low_high is None:
        return "-"
    return f"{low_high[0]:.3g} to {low_high[1]:.3g}"
