"""The model card of a run: what was trained, its curve, its evaluation and its configuration.

Source of the metadata's keys: the hub's documentation of model cards (huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlvr import __version__
from rlvr.run.closing import compared_with_start
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.run_folder import RunFolder
from rlvr.run.train_state import TrainState

CURVE = "training_curve.svg"
"""The picture beside the card."""
# A table that is read, not computed with: ten rows show the course, all are in metrics.jsonl.
ROWS = 10


def write_card(
    run: RunFolder, resolved: ResolvedConfig, state: TrainState, model: Path, repo: str, place: Path
) -> None:
    """Write README.md and the picture of the curve of a run into the folder `place`, for the model in the folder
    `model`."""
    points = [(row["step"], row["reward/mean"]) for row in state.metrics if row.get("reward/mean") is not None]
    lines = [
        "---",
        yaml.safe_dump(_metadata(resolved, model), sort_keys=False).strip(),
        "---",
        "",
        f"# {repo.rpartition('/')[2]}",
        "",
        _summary(resolved, state),
        "",
    ]
    if state.evaluations:
        lines += ["## Evaluation", "", *_evaluation(run, state), ""]
    if points:
        (place / CURVE).write_text(_picture(points), encoding="utf-8")
        lines += ["## Training", "", f"![reward by step]({CURVE})", "", *_course(points), ""]
    lines += ["## Use", "", "```python", *_use(repo, model), "```", "", "## Configuration", ""]
    written = yaml.safe_dump(redacted(run.given.tree), sort_keys=False, allow_unicode=True).strip()
    # Longer than any fence inside, such as that of a template in the configuration.
    fence = "`" * (3 + written.count("```"))
    lines += [f"{fence}yaml", written, fence, ""]
    (place / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _metadata(resolved: ResolvedConfig, model: Path) -> dict[str, Any]:
    adapter = (model / "adapter_config.json").exists()
    data: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    base = resolved.config.model.path
    # A folder of this machine is no name on the hub.
    if base is not None and not Path(base).exists():
        data["base_model"] = base
    return {**data, "tags": ["rlvr", "grpo", "reinforcement-learning"]}


def _summary(resolved: ResolvedConfig, state: TrainState) -> str:
    base = resolved.config.model.path or "A model built from random weights"
    if Path(base).exists():
        base = Path(base).name
    kinds = " then ".join(dict.fromkeys(plan.kind for plan in resolved.plans))
    return (
        f"{base}, trained for {state.step} steps ({kinds}, preset `{resolved.config.algorithm.preset}`) with "
        f"verifiable rewards by rlvr {__version__}."
    )


def _evaluation(run: RunFolder, state: TrainState) -> list[str]:
    """A table of the first and the last evaluation, with the paired 95 % intervals of the change where both are of the
    same tasks."""
    first = state.evaluations[0]
    last = state.evaluations[-1]
    changes = (compared_with_start(run.path) or {"differences": {}})["differences"]
    rows = [f"| held-out tasks | step {first['step']} | step {last['step']} | change (95 %) |", "|---|---|---|---|"]
    shown = ("eval/greedy", "eval/mean", "eval/pass@", "eval/maj@")
    for name in [name for name, value in last.items() if name.startswith(shown) and value is not None]:
        short = name.removeprefix("eval/")
        change = "-"
        if short in changes:
            low, high = changes[short]["interval"]
            change = f"{100 * changes[short]['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
        rows.append(f"| {short} | {_percent(first.get(name))} | {_percent(last[name])} | {change} |")
    return rows


def _percent(value: Any) -> str:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f} %"


def _course(points: Sequence[tuple[int, float]]) -> list[str]:
    """A table of the mean reward at ROWS steps, the first and the last among them."""
    count = min(ROWS, len(points))
    chosen = sorted({round(number * (len(points) - 1) / max(1, count - 1)) for number in range(count)})
    rows = ["| step | mean reward |", "|---|---|"]
    return rows + [f"| {points[place][0]} | {points[place][1]:.3f} |" for place in chosen]


def _use(repo: str, model: Path) -> list[str]:
    if (model / "adapter_config.json").exists():
        return [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{repo}")',
        ]
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        f'model = AutoModelForCausalLM.from_pretrained("{repo}")',
    ]


def _picture(points: Sequence[tuple[int, float]]) -> str:
    """The mean reward by step as an SVG of 640 x 240, with the ends of both axes."""
    width, height, left, bottom = 640, 240, 60, 30
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    # A flat curve has no scale: it is drawn in the middle.
    span = (high - low) or 1.0
    middle = low if high > low else low - 0.5

    def place(step: int, value: float) -> str:
        x = left + (step - steps[0]) / max(1, steps[-1] - steps[0]) * (width - left - 20)
        y = 15 + (1 - (value - middle) / span) * (height - bottom - 30)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, value) for step, value in points)
    text = 'font-family="sans-serif" font-size="12" fill="#555"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>mean reward, {low:.3f} to {high:.3f}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="2"/>',
            f'<text x="{left - 8}" y="20" text-anchor="end" {text}>{high:.3g}</text>',
            f'<text x="{left - 8}" y="{height - bottom}" text-anchor="end" {text}>{low:.3g}</text>',
            f'<text x="{left}" y="{height - 8}" {text}>step {steps[0]}</text>',
            f'<text x="{width - 20}" y="{height - 8}" text-anchor="end" {text}>step {steps[-1]}</text>',
            "</svg>",
            "",
        ]
    )


def redacted(tree: Any) -> Any:
    """A configuration for others to read: without the values of keys that hold a secret."""
    secret = ("api_key", "password", "secret", "access_token", "auth_token")
    if isinstance(tree, dict):
        return {
            key: "<redacted>" if str(key).lower().endswith(secret) and value is not None else redacted(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [redacted(item) for item in tree]
    return tree
