"""The closing lines of a run: each stage's end against the start, where things are, and where to look next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlvr.errors import DataError
from rlvr.evaluation import compare, comparison_lines, read_result
from rlvr.monitor.console import Console
from rlvr.monitor.console_text import percent
from rlvr.run.train_state import TrainState


def show_closing(console: Console, folder: Path, state: TrainState) -> None:
    """Show the closing lines of the run in `folder`."""
    rows = _milestones(state.evaluations)
    names = [
        name
        for name in dict.fromkeys(key for row in rows for key, value in row.items() if value is not None)
        if name.startswith(("eval/greedy", "eval/pass@", "eval/maj@"))
    ]
    if rows and names:
        shown = [[row["label"], *(percent(row.get(name)) for name in names)] for row in rows]
        console.table("held-out tasks", ["", *(name.removeprefix("eval/") for name in names)], shown)
    for line in _against_the_start(folder):
        console.message(line)
    written = ["metrics.jsonl", "rollouts/", f"checkpoints/step-{state.step}/model"]
    if state.evaluations:
        written.insert(1, "evaluations.jsonl")
    console.message(f"run folder: {folder}")
    console.message(f"   with {', '.join(written)}")
    console.message(f"report: {_report(folder)}")
    console.message("next: read a few rollouts in the report; change a setting with key.path=value,")
    console.message("      such as algorithm.preset=dr_grpo; your own tasks go into data.train,")
    console.message("      your own verifier into verifier=FILE.py:Class")
    last = state.metrics[-1] if state.metrics else {}
    reward = ""
    if last.get("reward/mean") is not None:
        reward = f", reward {last['reward/mean']:.3f}"
    steps = "1 step" if state.step == 1 else f"{state.step} steps"
    console.closing(f"done: {steps}{reward}, run folder {folder}")
    console.finish()


def _report(folder: Path) -> str:
    """The place of the report, or the call that writes it where there is none or one of an earlier step."""
    report = folder / "report.html"
    if not report.exists():
        return "trainer.report()"
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_mtime > report.stat().st_mtime:
        return f"trainer.report() ({report} is of an earlier step)"
    return f"{report} (open it in a browser)"


def compared_with_start(folder: Path) -> dict[str, Any] | None:
    """The last evaluation of the run in `folder` compared with that at the start, task by task (`evaluation.compare`);
    None where one of the two is missing."""
    files = sorted((folder / "evaluations").glob("step-*.json"))
    # Without the evaluation at the start there is nothing to compare with.
    if len(files) < 2 or files[0].stem != "step-000000":
        return None
    try:
        return compare(read_result(files[0]), read_result(files[-1]), [])
    except DataError:  # other tasks than at the start
        return None


def _against_the_start(folder: Path) -> Iterator[str]:
    """Yield lines that compare the last evaluation with the baseline's; none where one of the two is missing."""
    comparison = compared_with_start(folder)
    if comparison is None:
        return
    yield from comparison_lines(comparison)


def _milestones(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first evaluation and the last one of each stage, labelled."""
    if not evaluations:
        return []
    # Later rows replace earlier ones: the last evaluation of each stage remains.
    last = {row["stage"]: row for row in evaluations if row["step"] > 0}
    first = []
    if evaluations[0]["step"] == 0:
        first = [{**evaluations[0], "label": "start"}]
    return first + [{**row, "label": f"after {stage} (step {row['step']})"} for stage, row in last.items()]
