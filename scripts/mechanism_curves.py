"""Compare ten mechanisms with GRPO at equal samples on a CPU, and write docs/curves/mechanisms.

    OMP_NUM_THREADS=1 python scripts/mechanism_curves.py RUNS   # train what RUNS lacks (20 minutes for all), and write
    python scripts/mechanism_curves.py                          # write page and pictures again from results.json

`plan.yaml`, committed before the first run, has the tasks, measures and expected signs. RUNS is a folder for the runs;
a run that is complete there is not trained again.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from line_chart import LineChart

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/curves/mechanisms"
COMMAND = "OMP_NUM_THREADS=1 python scripts/mechanism_curves.py RUNS"
T_QUANTILE = 4.302653  # the 0.975 quantile of Student's t with 2 degrees of freedom: three seeds
HEAD = """# Mechanisms against GRPO

This page compares ten published mechanisms with GRPO on a policy of 372 thousand parameters that adds numbers of two
digits. `plan.yaml` states the task, the measure and the expected sign of each mechanism; it was committed before the
first measured run (`git log -- docs/curves/mechanisms`). All runs of a seed have the same start and the same number of
sampled responses. A difference is that of a mechanism and GRPO of the same seed; its interval is Student's t with 2
degrees of freedom over three seeds.

GRPO is the algorithm section of `configs/methods/grpo.yaml` without its KL term, which none of the ten has. A mechanism
is the sections named below of its recipe's file, over the task's sizes, data and learning rate. The claims of psr,
canon, lite-ppo, rover, grpo-lambda and tempo are those of the recipes (`effect`); those of dapo, dr-grpo, gspo and
cispo were written from memory of the papers: their text and section numbers were not checked for this page.

How to read it. Three seeds find large effects only: the interval is 4.3 standard errors wide on each side. *Not
separable from 0* says that the sign does not show here; it does not say that the claim is wrong. The policy is small,
responses have about 26 tokens, there are 30 steps, and learning rate and sizes are the same for all methods: they were
chosen with GRPO and tuned for no mechanism. Of ten intervals of 95 %, half an interval on average misses the truth; no
correction is made for that. Blue: GRPO. Brown: the mechanism. Thin: a seed. Thick: the mean.

Made on 25 November 2026 in 19 minutes. grpo-lambda was run again on the same day with the alpha of 0.6 that its recipe
has now; with the 0.2 that it had before, the difference was -1.271 tokens (-2.602 to +0.061), not separable from 0.
GRPO, run again beside it to see whether the older runs are still its pairs, came out the same for seed 1 and slightly
otherwise for seeds 0 and 2; against these runs the difference is -1.596 (-1.858 to -1.335).

`scripts/mechanism_curves.py` writes this page from `results.json`. Run it in the root of the repository:
"""
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


def taken_of(plan: dict[str, Any], method: str, config: dict[str, Any]) -> dict[str, Any]:
    """The sections of a run's configuration that its method's file gave."""
    source = plan["baseline"] if method == "grpo" else plan["mechanisms"][method]
    return {section: config[section] for section in source["takes"] if section in config}


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

    if (folder / "written.json").is_file():
        return
    run = {"run": {"name": folder.name, "dir": str(folder.parent), "seed": seed, "overwrite": True}}
    if model is not None:
        run["model"] = {"path": str(model)}
    print(f"== {folder.name}", flush=True)
    with GRPOTrainer(config=load_config(merge(config, run))) as trainer:
        trainer.train()
    # The sections as the recipe has them now: a later `collect` must not take those of a changed recipe.
    (folder / "written.json").write_text(json.dumps(config), encoding="utf-8")


def collect(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The numbers of the runs in `folder` that are complete, with the plan they were made by."""
    import torch

    runs = []
    for task, method, seed in runs_of(plan):
        run = folder / f"{task}-{method}-{seed}"
        # Written last.
        if (run / "written.json").is_file():
            written = json.loads((run / "written.json").read_text(encoding="utf-8"))
            key = {"task": task, "method": method, "seed": seed, "settings": taken_of(plan, method, written)}
            runs.append({**key, **numbers(run, plan["window"])})
    starts = {
        seed: held_out(folder / f"start-{seed}")
        for seed in plan["seeds"]
        if (folder / f"start-{seed}/written.json").is_file()
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__}
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


# Page and pictures


def shown_series(measure: str) -> str:
    """The numbers by step that a picture shows for a measure: its own, or the share of right responses."""
    return measure if measure in SERIES else "learning"


def picture(results: dict[str, Any], name: str) -> str:
    """An SVG of GRPO (blue) and a mechanism (brown) by step: each seed thin, the mean of the seeds thick."""
    mechanism = results["plan"]["mechanisms"][name]
    series = shown_series(mechanism["measure"])
    lines = {
        method: [
            run["series"][series]
            for run in results["runs"]
            if (run["task"], run["method"]) == (mechanism["task"], method)
        ]
        for method in ("grpo", name)
    }
    points = [value for seeds in lines.values() for line in seeds for value in line if value is not None]
    if not points:
        return LineChart(1, 1, 0, 1).svg()
    steps = max(len(line) for seeds in lines.values() for line in seeds)
    chart = LineChart(1, steps, min(points), max(points))
    chart.axes((1, *range(5, steps + 1, 5)))
    for method, color in (("grpo", "#7a96d8"), (name, "#b3400e")):
        for line in lines[method]:
            chart.line(known(line), f'stroke="{color}" stroke-width="0.7"')
        chart.line(known(mean_by_step(lines[method])), f'stroke="{color}" stroke-width="2.5"')
    return chart.svg()


def known(line: list[float | None]) -> list[tuple[int, float]]:
    """(step, value) of the steps that have one."""
    return [(step, value) for step, value in enumerate(line, start=1) if value is not None]


def mean_by_step(lines: list[list[float | None]]) -> list[float | None]:
    """The mean over the lines at each step; None where a line has no value."""
    columns = zip(*lines, strict=True)
    return [None if None in column else statistics.fmean(column) for column in columns]


def page(results: dict[str, Any]) -> str:
    """The page."""
    plan = results["plan"]
    names = sorted(plan["mechanisms"])
    found = {name: comparison(results, name) for name in names}
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    seeds = ", ".join(map(str, plan["seeds"]))
    responses = sorted({run["responses"] for run in results["runs"]})
    parts = [
        HEAD,
        f"```bash\n{results['command']}\n```\n",
        f"Seeds {seeds}; {versions}; one thread of a CPU. Every run samples "
        f"{' or '.join(f'{count:,}' for count in responses)} responses.\n",
        "## Findings\n",
        summary(found),
        table(plan, found),
        "## Tasks and measures\n",
        *[f"- `{name}`: {task['about']}." for name, task in plan["tasks"].items()],
        "",
        *[f"- **{name}**: {text}." for name, text in plan["measures"].items()],
        "",
        starts_text(results),
        "Tried to choose the sizes, before the plan, with GRPO alone and seed 0:\n",
        *[f"- {text}" for text in plan["tried"]],
        "",
    ]
    for name in names:
        parts += section(results, name, found[name])
    return "\n".join(parts)


def summary(found: dict[str, dict[str, Any]]) -> str:
    """The number of mechanisms with each finding, with their names."""
    kinds = dict.fromkeys(one["finding"] for one in found.values())
    lines = []
    for kind in sorted(kinds):
        names = [name for name, one in found.items() if one["finding"] == kind]
        lines.append(f"- {kind}: {len(names)} of {len(found)} ({', '.join(names)})")
    return "\n".join(lines) + "\n"


def table(plan: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    """The table of all mechanisms."""
    lines = [
        "| mechanism | task | measure | expected | GRPO | mechanism | difference, 95 % | sign |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        mechanism = plan["mechanisms"][name]
        numbers_shown = "- | - | -"
        if "mean" in one:
            low, high = one["interval"]
            numbers_shown = (
                f"{one['grpo']:.3f} | {one['mechanism']:.3f} | {one['mean']:+.3f} ({low:+.3f} to {high:+.3f})"
            )
        lines.append(
            f"| [{name}](#{name}) | {mechanism['task']} | {mechanism['measure']} | {mechanism['sign']} "
            f"| {numbers_shown} | {one['finding']} |"
        )
    return "\n".join(lines) + "\n"


def starts_text(results: dict[str, Any]) -> str:
    """The scores of the starts, which all runs of a seed share."""
    scores = [
        f"seed {seed} {start['accuracy']:.3f} (pass@16 {start['pass_16']:.3f})"
        for seed, start in results["starts"].items()
    ]
    ends = []
    for task in results["plan"]["tasks"]:
        accuracies = values(results, task, "grpo", "accuracy").values()
        ends.append(f"{task} {statistics.fmean(accuracies):.3f}" if accuracies else f"{task} not run")
    mean = statistics.fmean(start["accuracy"] for start in results["starts"].values())
    return (
        f"Accuracy of the shared starts: {', '.join(scores)}; mean {mean:.3f}. Of GRPO after the last step, mean: "
        f"{', '.join(ends)}. Where GRPO gains little, a mechanism has little to be compared with.\n"
    )


def section(results: dict[str, Any], name: str, one: dict[str, Any]) -> list[str]:
    """The part of the page about one mechanism."""
    mechanism = results["plan"]["mechanisms"][name]
    series = shown_series(mechanism["measure"])
    parts = [
        f"## {name}\n",
        f"![{series} of GRPO and {name} by step]({name}.svg)\n",
        f"Claim: {mechanism['claim']} From `{mechanism['file']}`: {', '.join(mechanism['takes'])}. "
        f"Shown by step: {series}.\n",
    ]
    if "left_out" in mechanism:
        parts.append(f"Not in the comparison: {mechanism['left_out']}\n")
    if "differences" in one:
        by_seed = ", ".join(f"{difference:+.4f}" for difference in one["differences"])
        parts.append(f"Difference of {mechanism['measure']} by seed: {by_seed}. Sign: {one['finding']}.\n")
        if mechanism["measure"] != "accuracy":
            # A length or an entropy says little of a policy that no longer answers.
            accuracies = [
                statistics.fmean(values(results, mechanism["task"], method, "accuracy").values())
                for method in ("grpo", name)
            ]
            parts.append(f"Beside the plan, held-out accuracy: GRPO {accuracies[0]:.3f}, {name} {accuracies[1]:.3f}.\n")
    else:
        parts.append(f"The comparison is {one['finding']}.\n")
    return parts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
