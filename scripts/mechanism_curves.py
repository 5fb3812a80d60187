"""Compare ten mechanisms with GRPO at equal samples on a CPU, and write docs/curves/mechanisms.

    OMP_NUM_THREADS=1 python scripts/mechanism_curves.py RUNS   # train what RUNS lacks (30 minutes for all), and write
    python scripts/mechanism_curves.py                          # write page and pictures again from results.json

`plan.yaml`, committed before the first run, has the tasks, measures and expected signs. RUNS is a folder for the runs;
a run that is complete there is not trained again.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/curves/mechanisms"
COMMAND = "OMP_NUM_THREADS=1 python scripts/mechanism_curves.py RUNS"
T_QUANTILE = 4.302653  # the 0.975 quantile of Student's t with 2 degrees of freedom: three seeds
SERIES = ("learning", "entropy", "wrong_length", "right_length")


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    plan = read_plan()
    results = FOLDER / "results.json"
    if arguments:
        # Also after a failure or an interruption what is there is written.
        try:
            train_missing(plan, Path(arguments[0]))
        finally:
            results.write_text(as_json(collect(plan, Path(arguments[0]))), encoding="utf-8")
    kept = json.loads(results.read_text(encoding="utf-8"))
    for name in plan["mechanisms"]:
        (FOLDER / f"{name}.svg").write_text(picture(kept, name), encoding="utf-8")
    (FOLDER / "README.md").write_text(page(kept), encoding="utf-8")
    return 0


def read_plan() -> dict[str, Any]:
    """The plan."""
    return yaml.safe_load((FOLDER / "plan.yaml").read_text(encoding="utf-8"))


# Training


def runs_of(plan: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Task, method and seed of every run: seed by seed, so that an interrupted series has whole pairs."""
    for seed in plan["seeds"]:
        for task in plan["tasks"]:
            yield task, "grpo", seed
            for name, mechanism in plan["mechanisms"].items():
                if mechanism["task"] == task:
                    yield task, name, seed


def config_of(plan: dict[str, Any], task: str, method: str) -> dict[str, Any]:
    """The configuration of a run, without its folder, seed and start."""
    from rlvr.core.tree import merge

    source = plan["baseline"] if method == "grpo" else plan["mechanisms"][method]
    tree = yaml.safe_load((ROOT / source["file"]).read_text(encoding="utf-8"))
    taken = {key: tree[key] for key in source["takes"] if key in tree}
    for key in source.get("without", []):
        del taken["algorithm"][key]
    config = merge(plan["every_run"], plan["training"])
    return merge(merge(config, plan["tasks"][task]["config"]), taken)


def train_missing(plan: dict[str, Any], folder: Path) -> None:
    """Train the starts and the runs that `folder` lacks, one after the other."""
    from rlvr.core.tree import merge

    start = merge(plan["every_run"], plan["start"])
    for seed in plan["seeds"]:
        train(start, folder / f"start-{seed}", seed, None)
    for task, method, seed in runs_of(plan):
        model = next((folder / f"start-{seed}/checkpoints").glob("step-*/model"))
        train(config_of(plan, task, method), folder / f"{task}-{method}-{seed}", seed, model)


def train(config: dict[str, Any], folder: Path, seed: int, model: Path | None) -> None:
    """Train one run in `folder`, unless it is complete there; from the weights in `model`, or from random ones."""
    from rlvr.config.config_loading import load_config
    from rlvr.core.tree import merge
    from rlvr.trainer import GRPOTrainer

    if (folder / "evaluations.jsonl").is_file():
        return
    run = {"run": {"name": folder.name, "dir": str(folder.parent), "seed": seed, "overwrite": True}}
    if model is not None:
        run["model"] = {"path": str(model)}
    print(f"== {folder.name}", flush=True)
    with GRPOTrainer(config=load_config(merge(config, run))) as trainer:
        trainer.train()


def collect(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The numbers of the runs in `folder` that are complete, with the plan they were made by."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    runs = [
        {"task": task, "method": method, "seed": seed, **numbers(folder / f"{task}-{method}-{seed}", plan["window"])}
        for task, method, seed in runs_of(plan)
        if (folder / f"{task}-{method}-{seed}/evaluations.jsonl").is_file()
    ]
    starts = {
        seed: held_out(folder / f"start-{seed}")
        for seed in plan["seeds"]
        if (folder / f"start-{seed}/evaluations.jsonl").is_file()
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit.strip()}
    return {"command": COMMAND, "versions": versions, "plan": plan, "starts": starts, "runs": runs}


def held_out(run: Path) -> dict[str, float]:
    """The scores of a run's last evaluation."""
    last = json.loads((run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {"accuracy": last["eval/mean"], "pass_16": last["eval/pass@16"], "greedy": last["eval/greedy"]}


def numbers(run: Path, window: int) -> dict[str, Any]:
    """The measures of a run, and by step the numbers that the pictures show."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lengths: dict[bool, list[list[int]]] = {True: [], False: []}
    for row in rows:
        step = (run / f"rollouts/step-{row['step']:06d}.jsonl").read_text(encoding="utf-8")
        rollouts = [json.loads(line) for line in step.splitlines()]
        for right, steps in lengths.items():
            # The origin of a sampled token is 1.
            steps.append([sum(one["origin"]) for one in rollouts if (score_of(one) == 1) == right])
    series = {
        "learning": [row["verdict/correct"] for row in rows],
        "entropy": [row["entropy"] for row in rows],
        "wrong_length": [statistics.fmean(step) if step else None for step in lengths[False]],
        "right_length": [statistics.fmean(step) if step else None for step in lengths[True]],
    }
    measures: dict[str, Any] = {
        **held_out(run),
        "learning": statistics.fmean(series["learning"]),
        "entropy": statistics.fmean(series["entropy"][-window:]),
    }
    for name, right in (("wrong_length", False), ("right_length", True)):
        last = [length for step in lengths[right][-window:] for length in step]
        # A method that has no such response in its last steps has no measure, and the page says so.
        measures[name] = statistics.fmean(last) if last else None
    responses = sum(len(step) for steps in lengths.values() for step in steps)
    rounded = {name: [value if value is None else round(value, 4) for value in series[name]] for name in SERIES}
    return {"responses": responses, "measures": measures, "series": rounded}


def score_of(rollout: dict[str, Any]) -> float:
    """The score of a rollout's one verdict."""
    (verdict,) = rollout["verdicts"].values()
    return verdict["score"]


def as_json(results: dict[str, Any]) -> str:
    """JSON with one run a line, so that a difference between two versions can be read."""
    head = {key: value for key, value in results.items() if key != "runs"}
    lines = ",\n".join(json.dumps(run) for run in results["runs"])
    return json.dumps(head)[:-1] + f', "runs": [\n{lines}\n]}}\n'


# Comparison


def values(results: dict[str, Any], task: str, method: str, measure: str) -> dict[int, float]:
    """Seed -> value of a measure, of the runs that have one."""
    found = (run for run in results["runs"] if (run["task"], run["method"]) == (task, method))
    return {run["seed"]: run["measures"][measure] for run in found if run["measures"][measure] is not None}


def comparison(results: dict[str, Any], name: str) -> dict[str, Any]:
    """A mechanism against GRPO on its task: means, the mean paired difference and its 95 % interval, the finding."""
    mechanism = results["plan"]["mechanisms"][name]
    task, measure = mechanism["task"], mechanism["measure"]
    ours = values(results, task, name, measure)
    theirs = values(results, task, "grpo", measure)
    seeds = sorted(set(ours) & set(theirs))
    if len(seeds) < 3:
        return {"seeds": seeds, "finding": "not run to its end with three seeds"}
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    mean = statistics.fmean(differences)
    half = T_QUANTILE * statistics.stdev(differences) / math.sqrt(len(differences))
    if mean - half <= 0 <= mean + half:
        finding = "not separable from 0"
    elif (mean > 0) == (mechanism["sign"] == "+"):
        finding = "as expected"
    else:
        finding = "the opposite"
    return {
        "seeds": seeds,
        "grpo": statistics.fmean(theirs[seed] for seed in seeds),
        "mechanism": statistics.fmean(ours[seed] for seed in seeds),
        "differences": differences,
        "mean": mean,
        "interval": (mean - half, mean + half),
        "finding": finding,
    }


def picture(results: dict[str, Any], name: str) -> str:
    raise NotImplementedError


def page(results: dict[str, Any]) -> str:
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
