"""The page: data of runs, packed, with the style and the script that show it; runs that belong to one experiment, and
the differences between their configurations."""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.core.own_files import check_output
from rlvr.errors import ConfigError
from rlvr.monitor.health import MONITORS
from rlvr.monitor.metrics import FAMILIES, METRICS
from rlvr.monitor.rollout_log import json_line
from rlvr.monitor.whole_file import write_whole
from rlvr.report.folder import RunData, read_run, reads
from rlvr.report.headline import curve_of, facts, score_of, sentence
from rlvr.report.sampled_rollouts import BYTES, histogram, read_rollouts

# With LARGEST and BYTES: a page of some megabytes that a browser opens in a second or two; --rollouts sets it.
SHOWN = 2500
"""Rollouts that a page shows, over all runs."""
# More than three points for each of the 420 units that a chart is wide: a curve looks the same with more.
POINTS = 1500
"""Points of a curve; of more steps, neighbours are averaged."""
# Base64 of gzip; unpacked it is several times as large in the browser's memory.
LARGEST = 15_000_000
"""Bytes of packed data. Where there are more, half of the rollouts are left out, and again."""
SCRIPTS = ("core.js", "charts.js", "curves.js", "rollouts.js", "main.js")


def write_report(folders: Sequence[str | Path], output: str | Path | None = None, rollouts: int = SHOWN) -> Path:
    """Write the page of the runs in `folders`, by default as report.html of the first; its path.

    DataError where one is no run folder; ConfigError where the page cannot be written, or would replace another file.
    """
    runs = [read_run(folder) for folder in folders]
    _name_apart(runs)
    if output is None:
        path = runs[0].path / "report.html"
    else:
        path = Path(output)
    check_output(path, lambda head: "<title>rlvr report</title>" in head, "a report")
    page = render(runs, rollouts)
    try:
        write_whole(path, page)
    except OSError as error:
        raise ConfigError(f"the report {path} cannot be written: {error}") from error
    return path


def render(runs: Sequence[RunData], rollouts: int = SHOWN) -> str:
    """The page as text."""
    # Both bounds are shared equally by the runs of a page.
    read = [read_rollouts(run, max(1, rollouts // len(runs)), BYTES // len(runs)) for run in runs]
    shown = [{**row, "run": number} for number, of_run in enumerate(read) for row in of_run.shown]
    data: dict[str, Any] = {
        "checks": len(MONITORS),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [
            {**_run(run), "lengths": histogram(of_run.lengths), "rewards": histogram(of_run.rewards)}
            for run, of_run in zip(runs, read, strict=True)
        ],
        "differences": differences([run.config for run in runs]) if len(runs) > 1 else [],
        "metrics": {name: [m.unit, m.description, m.healthy] for name, m in {**METRICS, **FAMILIES}.items()},
        "notes": [of_run.note for of_run in read if of_run.note],
    }
    packed = _packed(data, shown)
    while len(packed) > LARGEST and len(shown) > 1:
        # Every other rollout, so that all steps keep their share.
        shown = shown[::2]
        data["notes"] = [
            *data["notes"][: len(runs)],
            f"of these, {len(shown):,} are shown: the page would be too large",
        ]
        packed = _packed(data, shown)
    static = importlib.resources.files("rlvr.report") / "static"
    page = (static / "report.html").read_text(encoding="utf-8")
    script = "\n".join((static / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {"STYLE": (static / "report.css").read_text(encoding="utf-8"), "SCRIPT": script, "DATA": packed}
    for name, text in parts.items():
        # DATA last: its base64 has no `*`, so no text of a run can be taken for one of these marks.
        page = page.replace(f"/*{name}*/", text)
    return page


def _name_apart(runs: Sequence[RunData]) -> None:
    """Number the runs that have the same name."""
    names = [run.name for run in runs]
    for number, run in enumerate(runs):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({names[: number + 1].count(run.name)})"


def _packed(data: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]) -> str:
    """The data with the rollouts, whose prompts are kept once: gzip, then base64, which no text can break out of."""
    prompts: dict[str, int] = {}
    rows = [{**row, "prompt": prompts.setdefault(str(row["prompt"]), len(prompts))} for row in shown]
    text = json_line({**data, "rollouts": rows, "prompts": list(prompts)})
    return base64.b64encode(gzip.compress(text, 6)).decode("ascii")


def _run(run: RunData) -> dict[str, Any]:
    rows, every = _thinned(run.rows)
    # Step 0, the evaluation before training, is in no row of metrics.
    rows = [*({**row, "run/stage": row.get("stage")} for row in run.evaluations if row["step"] == 0), *rows]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("step", "run/stage", "stage"))
    columns = {name: [_short(row.get(name)) for row in rows] for name in names}
    score = score_of(run)
    curve = curve_of(run, score) if score else None
    notes = [*run.notes, *([f"curves: each point is the mean of {every} steps"] if every > 1 else [])]
    return {
        "name": run.name,
        "headline": sentence(run, score, curve),
        "score": score,
        "points": [[step, *map(_short, values)] for step, *values in curve.points] if curve else [],
        "binary": curve.every_verdict_binary if curve else None,
        "facts": facts(run),
        "seed": (run.config.get("run") or {}).get("seed") if isinstance(run.config.get("run"), dict) else None,
        "experiment": experiment_of(run.config) if run.config else run.name,
        "config": [[key, _text(value)] for key, value in flat(run.config)] if run.config else [],
        "finished": len(run.rows),
        "last_step": run.rows[-1]["step"] if run.rows else 0,
        "seconds": sum(row["time/step"] for row in run.rows if isinstance(row.get("time/step"), (int, float))),
        "steps": [row["step"] for row in rows],
        "columns": {name: values for name, values in columns.items() if any(v is not None for v in values)},
        "stages": _stages(run.rows),
        "evaluations": [{k: _short(v) if k != "stage" else v for k, v in row.items()} for row in run.evaluations],
        "health": [{**finding.to_json(), "reads": reads(finding)} for finding in run.findings],
        "notes": notes,
    }


def _thinned(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """At most `POINTS` rows, each of so many steps, with the means of their numbers; an evaluated step keeps its
    results."""
    every = math.ceil(len(rows) / POINTS)
    if every <= 1:
        return rows, 1
    thinned = []
    for begin in range(0, len(rows), every):
        part = rows[begin : begin + every]
        merged: dict[str, Any] = {"step": part[-1]["step"], "run/stage": part[-1].get("run/stage")}
        for name in dict.fromkeys(name for row in part for name in row):
            values = [row[name] for row in part if isinstance(row.get(name), (int, float))]
            # The mean of those that have the number: an evaluation in a block of steps is kept as it is.
            if name != "step" and values:
                merged[name] = sum(values) / len(values)
        thinned.append(merged)
    return thinned, every


def _short(value: Any) -> Any:
    """A number to six digits."""
    if isinstance(value, float):
        # Six digits are more than a chart or its tooltip shows, and a third of the bytes of a float64's text.
        return float(f"{value:.6g}")
    if isinstance(value, (int, str)):
        return value
    return None


def _stages(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Name and first step of each stage."""
    stages = itertools.groupby(rows, lambda row: str(row.get("run/stage") or ""))
    return [[name, next(of_stage)["step"]] for name, of_stage in stages]


APART = ("run.name", "run.dir", "run.overwrite", "run.seed", "logging", "health", "checkpoint")
"""Settings in which runs may differ and still be seeds of one experiment."""
OWN = ("run.name", "run.dir", "run.overwrite")
"""Settings whose difference is not worth a row."""


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration by their dotted keys."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for number, item in enumerate(tree):
            yield from flat(item, f"{path}[{number}]")
    else:
        yield path, tree


def _under(key: str, settings: Sequence[str]) -> bool:
    # `run.seed` matches itself; `logging` matches `logging.rollouts` and `logging[0].x`, not `logging_level`.
    return any(key == setting or key.startswith((f"{setting}.", f"{setting}[")) for setting in settings)


def experiment_of(config: Mapping[str, Any]) -> str:
    """A text that is the same for runs which differ in no more than their seed."""
    kept = {key: value for key, value in flat(config) if not _under(key, APART)}
    return json.dumps(kept, sort_keys=True, default=str)


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys that are not the same in all configurations, each with its values as texts ('' where it is not set)."""
    leaves = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for of_one in leaves for key in of_one)
    rows = []
    for key in keys:
        values = [_text(of_one[key]) if key in of_one else "" for of_one in leaves]
        if len(set(values)) > 1 and not _under(key, OWN):
            rows.append({"key": key, "values": values})
    return rows


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
