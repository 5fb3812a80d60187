"""What the commands of the pages find when a test runs them: the files that a page speaks of, and fewer steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from page_blocks import NAME, blocks

from small_run import TREE, overlaid, task_rows

HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
FEW = "stages.0.steps=1 stages.1.steps=1 evaluation.limit=2"
MINUTES = re.compile(r"rlvr[. ]train --config configs/(?:calculator|code-smoke|quickstart)\.yaml")
"""The runs of minutes, which get `FEW` as overrides."""

TASKS = task_rows()
ANSWERS = [{**task, "completion": rf"\boxed{{{task['answer']}}}", "expected": True} for task in TASKS]
PROGRAM = {
    "prompt": "Add.",
    "info": {"kind": "asserts", "tests": ["assert add(2, 3) == 5"]},
    "completion": "```python\ndef add(a, b):\n    return a + b\n```",
}

INSTEAD: dict[str, dict[str, str]] = {
    "README.md": {'{"steps": 50}': '{"steps": 2}'},
    "docs/README.md": {'{"steps": 50}': '{"steps": 2}'},
    "docs/api.md": {"configs/quickstart.yaml": "my.yaml"},
    "docs/from-trl.md": {"max_steps=100": "max_steps=2"},
    "docs/analysis.md": {
        "steps: 300": "steps: 2",
        "step-300": "step-2",
        "steps: 30}": "steps: 2}",
        "samples 64": "samples 8",
    }
    | {
        "--k 1,8,64": "--k 1,8",
        "--k 1,64": "--k 1,8",
        "warmup_steps: 30": "warmup_steps: 1",
        "warmup_steps=5": "warmup_steps=1",
    },
    "docs/evaluation.md": {"--nproc-per-node 4": "--nproc-per-node 2"},
}
"""By page: what a test writes otherwise, so that a run takes seconds."""

REWARD_AND_DATA = """from rlvr import GRPOTrainer
def my_reward(completion):
    return 1.0
dataset = [{"prompt": "1 + 1 ="}]
"""
BEFORE = {"docs/from-trl.md": REWARD_AND_DATA}
"""By page: names that its Python code takes as given."""

RUNS = {
    "docs/evaluation.md": ("quickstart", "mine"),
    "docs/replay.md": ("first", "run"),
    "docs/shapes.md": ("run",),
}
"""By page: the finished runs that it speaks of."""


def shortened(page: str, text: str) -> str:
    """A command or block with fewer steps, and the model of the folder `base` for that of the hub."""
    for written, other in INSTEAD.get(page, {}).items():
        text = text.replace(written, other)
    if "--dry-run" not in text:
        text = MINUTES.sub(lambda found: f"{found[0]} {FEW}", text)
    return text.replace(HUB_MODEL, "base")


def configuration(name: str, steps: int = 2) -> dict:
    """A run of fractions of a second on the files of `prepare`."""
    over = {
        "run": {"name": name, "steps": steps},
        "data": {"train": "train.jsonl", "eval": "held_out.jsonl"},
        "verifier": "math",
        "evaluation": {"samples": 2},
    }
    return overlaid(TREE, over)


def prepare(folder: Path, page: str, text: str, program: str) -> list[str]:
    """Write the files that the page's commands read; the commands that make its runs and its model.

    Args:
        folder: the working directory of the commands.
        page: the page, relative to the root of the repository.
        text: the page's text; the files that its blocks show are written, too.
        program: the command that trains.
    """
    rows = {
        "train.jsonl": TASKS,
        "held_out.jsonl": TASKS,
        "answers.jsonl": ANSWERS,
        "completions.jsonl": ANSWERS,
        "programs.jsonl": [PROGRAM],
    }
    for name, objects in rows.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in objects), encoding="utf-8")
    for name in ("my", "mine", "CONFIG"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(configuration(name)), encoding="utf-8")
    write_shown_files(folder, text)
    made = []
    for name in RUNS.get(page, ()):
        steps = 12 if name == "run" else 2
        (folder / f"{name}-run.yaml").write_text(yaml.safe_dump(configuration(name, steps)), encoding="utf-8")
        made.append(f"{program} --config {name}-run.yaml")
    if "base" in shortened(page, text):
        # Long enough for the default length of a response.
        long = overlaid(configuration("base", 1), {"model": {"scratch": {"context": 512}}})
        (folder / "base-run.yaml").write_text(yaml.safe_dump(long), encoding="utf-8")
        made += [f"{program} --config base-run.yaml", "cp -r runs/base/checkpoints/step-1/model base"]
    return made


def write_shown_files(folder: Path, text: str) -> None:
    """Write the files that the page shows under their names, the first line of their blocks."""
    for block in blocks(text):
        if block.file:
            (folder / block.file).parent.mkdir(exist_ok=True)
            (folder / block.file).write_text(NAME.sub("", block.text, count=1), encoding="utf-8")
