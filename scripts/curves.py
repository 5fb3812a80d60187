"""Draw docs/curves from finished runs: a curve for each shipped example, and the page that shows them.

    OMP_NUM_THREADS=1 python -m rlvr.train --config configs/NAME.yaml   # first, for each example (minutes each)
    python scripts/curves.py RUN [RUN ...]                              # keep its numbers in docs/curves/NAME.json
    python scripts/curves.py                                            # draw and write again from the kept numbers

A curve is an SVG of the mean reward (grpo) and the held-out score by step. `LEFT_OUT` says why an example has none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from line_chart import LineChart

from rlvr.monitor.console_text import percent

ROOT = Path(__file__).resolve().parents[1]
CURVES = ROOT / "docs/curves"
LEFT_OUT = {
    "gsm8k-qwen2.5-0.5b": "needs a GPU and a model from the hub; it has not been run here.",
    "mbpp-qwen2.5-coder-1.5b": "needs a GPU and a model from the hub; it has not been run here.",
    "gsm8k-smoke": "7 steps of a policy with random weights, to try the loop on real rows, which are not shipped; "
    "it learns nothing, by design.",
}
HEAD = """# Expected curves

This page shows how the shipped examples learned, with the command of each, so that you can compare your own run. On
another machine rounding differs, and so does the path; the shape should not. Blue: the mean reward of each `grpo`
step. Brown: the score on held-out tasks, greedy (dots) and sampled (dashes). The grey line marks the end of the first
stage.

[Mechanisms against GRPO](mechanisms/README.md) compares ten published methods with GRPO at equal samples.

Made on 21 November 2026 on a CPU. `scripts/curves.py` writes this page from the numbers beside each picture.
"""


def main(runs: list[str]) -> int:
    """Run the command; the exit code."""
    for run in runs:
        keep(Path(run))
    for path in sorted(CURVES.glob("*.json")):
        path.with_suffix(".svg").write_text(picture(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    (CURVES / "README.md").write_text(page(), encoding="utf-8")
    return 0


def keep(run: Path) -> None:
    """Write what is drawn of a run folder to docs/curves."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    stages = [row["run/stage"] for row in rows]
    name = config["run"]["name"]
    kept = {
        "command": f"OMP_NUM_THREADS=1 python -m rlvr.train --config configs/{name}.yaml",
        "seed": config["run"]["seed"],
        "first_stage": [stages[0], stages.count(stages[0])],
        "reward": [[row["step"], round(row["reward/mean"], 4)] for row in rows if row["reward/mean"] is not None],
        "greedy": [[row["step"], round(row["eval/greedy"], 4)] for row in evaluations],
        "sampled": [[row["step"], round(row["eval/mean"], 4)] for row in evaluations],
    }
    (CURVES / f"{name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")


def picture(run: dict[str, Any]) -> str:
    """A run as an SVG."""
    last = max(step for step, _ in [*run["reward"], *run["greedy"]])
    chart = LineChart(0, last, 0, 1)
    chart.axes(range(0, last + 1, max(1, round(last / 80) * 10)))
    stage, ends = run["first_stage"]
    if ends < last:
        chart.mark(ends, f"{stage} ends")
    chart.line(run["reward"], 'stroke="#7a96d8" stroke-width="1"')
    if run["sampled"]:  # the examples of docs/gallery.md need not evaluate
        chart.line(run["sampled"], 'stroke="#b3400e" stroke-width="2" stroke-dasharray="5 4"')
    if run["greedy"]:
        chart.line(run["greedy"], 'stroke="#b3400e" stroke-width="2"')
    chart.dots(run["greedy"], "#b3400e")
    return chart.svg()


def page() -> str:
    """The page of all examples."""
    parts = [HEAD]
    for config in sorted((ROOT / "configs").glob("*.yaml")):
        name, kept = config.stem, CURVES / f"{config.stem}.json"
        parts.append(f"## {name}\n")
        if not kept.is_file():
            parts.append(f"No curve: {LEFT_OUT.get(name, 'it has not been drawn yet.')}\n")
            continue
        run = json.loads(kept.read_text(encoding="utf-8"))
        middle = next(score for step, score in run["greedy"] if step >= run["first_stage"][1])
        start, first_stage, end = map(percent, (run["greedy"][0][1], middle, run["greedy"][-1][1]))
        parts.append(f"![Reward and held-out score of {name} by step]({name}.svg)\n")
        parts.append(f"```bash\n{run['command']}\n```\n")
        parts.append(
            f"Seed {run['seed']}, {run['greedy'][-1][0]} steps. Held-out score, greedy: {start} before training, "
            f"{first_stage} after the first stage, {end} at the end; "
            f"of samples at the end {percent(run['sampled'][-1][1])}.\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
