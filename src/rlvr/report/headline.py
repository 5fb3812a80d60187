"""The head of a run's page: what was learned, in one sentence and one curve with intervals, and what it ran on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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

KINDS = {"sft": "SFT", "grpo": "GRPO"}
"""Names of stages as a text writes them."""
# More would be no sentence any more; the table of evaluations has them all.
MOST_STAGES = 3
"""Most stages whose ends the sentence names."""

Point = tuple[int, float, float | None, float | None]
"""Step, score, and the ends of its 95 % interval where the results by task are there."""


def score_of(run: RunData) -> str | None:
    """The held-out score that stands at the head; None without evaluations."""
    return next((name for name in SCORES if any(_is_number(row.get(name)) for row in run.evaluations)), None)


@dataclass(frozen=True)
class HeldOutCurve:
    """A held-out score by step."""

    points: list[Point]
    every_verdict_binary: bool | None
    """Each of the scores behind the points is 0 or 1, so that their mean is the share of tasks answered right; None
    where the results by task of a point are not there."""


def curve_of(run: RunData, score: str) -> HeldOutCurve:
    """The score of every evaluation. The results by task are read for `BANDS` of them, the first and the last among
    these: their intervals, and whether each score is 0 or 1."""
    rows = [row for row in run.evaluations if _is_number(row.get(score))]
    every = max(1, -(-len(rows) // BANDS))
    points: list[Point] = []
    binary: list[bool | None] = []
    for number, row in enumerate(rows):
        low = high = None
        if number % every == 0 or number == len(rows) - 1:
            values = _values(run.path / "evaluations" / f"step-{row['step']:06d}.json", score)
            binary.append(None if values is None else bool(np.isin(values, (0.0, 1.0)).all()))
            bounds = None if values is None else interval(values)
            if bounds is not None:
                low, high = bounds[0], bounds[1]
        points.append((row["step"], float(row[score]), low, high))
    # One partial score is enough to know that the mean is no share; all have to be read to know that it is one.
    if False in binary:
        return HeldOutCurve(points, False)
    return HeldOutCurve(points, None if None in binary else True)


def _values(path: Path, score: str) -> np.ndarray | None:
    """[tasks]: the score of each task that has one; None where the results cannot be read."""
    try:
        values = values_of(read_result(path), [1])[score.removeprefix("eval/")]
    except (DataError, KeyError, ValueError, TypeError):  # no such file, or one of another version
        return None
    return values[values == values]


def score_in_words(score: str, curve: HeldOutCurve) -> str:
    """The name of a held-out score, and what the mean over tasks is, as far as that is known."""
    # pass@1 counts full marks only, whatever the verifier gives: a share of right samples. eval/mean counts all.
    if score != "eval/greedy" or curve.every_verdict_binary is None:
        return SCORES[score]
    return f"{SCORES[score]}, {'share right' if curve.every_verdict_binary else 'mean score'}"


def sentence(run: RunData, score: str | None, curve: HeldOutCurve | None) -> str:
    """Return one sentence that says what was learned, by each stage where there are several."""
    steps = run.rows[-1]["step"] if run.rows else 0
    span = "1 step" if steps == 1 else f"{steps:,} steps"
    if score is None or curve is None:
        rewards = [row["reward/mean"] for row in run.rows if _is_number(row.get("reward/mean"))]
        if not rewards:
            return f"{span}, no reward and no held-out score"
        return f"Reward {rewards[0]:.3g} → {rewards[-1]:.3g} in {span}; held-out tasks were not evaluated"
    last = curve.points[-1]
    text = f"Held-out tasks ({score_in_words(score, curve)}): {_course(run, curve.points)}"
    if last[2] is not None and last[3] is not None:
        text += f" (95 %: {_share(last[2])} to {_share(last[3])})"
    return f"{text} in {span}"


def _course(run: RunData, points: Sequence[Point]) -> str:
    """The first and the last score; with the end of each stage where the run evaluated before several stages."""
    first, last = points[0], points[-1]
    stage_of = {row["step"]: str(row["stage"]) for row in run.evaluations if row.get("stage")}
    # A later evaluation of a stage replaces an earlier one, and the evaluation at step 0 belongs to none.
    ends = {stage_of[step]: value for step, value, *_ in points if step > 0 and step in stage_of}
    if first[0] == 0 and 1 < len(ends) <= MOST_STAGES:
        after = [f"{_share(value)} after {KINDS.get(name, name)}" for name, value in ends.items()]
        return ", ".join([f"{_share(first[1])} before", *after])
    if len(points) > 1:
        return f"{_share(first[1])} → {_share(last[1])}"
    return _share(last[1])


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
