"""The head of a run's page: what was learned, in one sentence and one curve with intervals, and what it ran on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.errors import DataError
from rlvr.evaluation.estimators import interval
from rlvr.evaluation.result import read_result
from rlvr.evaluation.task_result import values_of
from rlvr.report.folder import RunData

SCORES = {"eval/greedy": "greedy", "eval/pass@1": "one sample", "eval/mean": "mean score"}
"""Held-out scores in the order in which one is chosen for the head, in words."""
# Each takes some milliseconds of bootstrap; a curve is as clear with 40 bands as with hundreds.
BANDS = 40
"""Most evaluations whose intervals are computed."""

Point = tuple[int, float, float | None, float | None]
"""Step, score, and the ends of its 95 % interval where the results by task are there."""


def score_of(run: RunData) -> str | None:
    """The held-out score that stands at the head; None without evaluations."""
    return next((name for name in SCORES if any(_is_number(row.get(name)) for row in run.evaluations)), None)


def points_of(run: RunData, score: str) -> list[Point]:
    """The score of every evaluation, with intervals for `BANDS` of them, the first and the last among these."""
    rows = [row for row in run.evaluations if _is_number(row.get(score))]
    every = max(1, -(-len(rows) // BANDS))
    points: list[Point] = []
    for number, row in enumerate(rows):
        low = high = None
        if number % every == 0 or number == len(rows) - 1:
            low, high = _interval(run.path / "evaluations" / f"step-{row['step']:06d}.json", score)
        points.append((row["step"], float(row[score]), low, high))
    return points


def _interval(path: Path, score: str) -> tuple[float | None, float | None]:
    try:
        values = values_of(read_result(path), [1])[score.removeprefix("eval/")]
    except (DataError, KeyError, ValueError, TypeError):  # no such file, or one of another version
        return None, None
    bounds = interval(values[values == values])
    return (None, None) if bounds is None else (bounds[0], bounds[1])


def sentence(run: RunData, score: str | None, points: Sequence[Point]) -> str:
    """Return one sentence that says what was learned."""
    steps = run.rows[-1]["step"] if run.rows else 0
    span = "1 step" if steps == 1 else f"{steps:,} steps"
    if score is None:
        rewards = [row["reward/mean"] for row in run.rows if _is_number(row.get("reward/mean"))]
        if not rewards:
            return f"{span}, no reward and no held-out score"
        return f"Reward {rewards[0]:.3g} → {rewards[-1]:.3g} in {span}; held-out tasks were not evaluated"
    first, last = points[0], points[-1]
    text = f"Held-out tasks ({SCORES[score]}): "
    if len(points) > 1:
        text += f"{_share(first[1])} → "
    text += _share(last[1])
    if last[2] is not None and last[3] is not None:
        text += f" (95 %: {_share(last[2])} to {_share(last[3])})"
    return f"{text} in {span}"


def facts(run: RunData) -> list[tuple[str, str]]:
    """Model, data, machine, versions, command and start of a run, as far as its folder says them."""
    model = _section(run.config, "model")
    data = _section(run.config, "data")
    scratch = "random weights" if model.get("scratch") else None
    environment = _environment(run.path)
    versions = environment.get("versions")
    devices = environment.get("devices") or []
    machine = [str(environment.get("machine") or ""), ", ".join(map(str, devices))]
    written = {
        "model": model.get("path") or scratch,
        "trained on": data.get("train"),
        "held out": _section(run.config, "evaluation").get("data") or data.get("eval"),
        "machine": "; ".join(filter(None, machine)),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else None,
        "command": environment.get("command"),
        "started": environment.get("started"),
    }
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in written.items() if value]


def _environment(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _share(value: float) -> str:
    """A score from 0 to 1 in percent; any other as it is."""
    return f"{100 * value:.1f} %" if 0 <= value <= 1 else f"{value:.3g}"
