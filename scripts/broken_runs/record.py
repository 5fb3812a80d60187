"""Break a small run for each monitor of health, with the real trainer, and record the findings.

    python scripts/broken_runs/record.py [NAME ...]     run these (all by default), then write record.json and the page
    python scripts/broken_runs/record.py --page         write the page from record.json

`runs.yaml` has the runs: one that is healthy, and for each monitor a change that breaks it. A broken run ends when its
monitor fires. The page is the part of docs/when-it-does-not-learn.md between two marks. Run from the root of the
repository; all runs take about three minutes on one core. Exit codes: 0 done, 1 a monitor did not fire.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlvr.core.tree import merge
from rlvr.errors import TrainingError
from rlvr.monitor.health import Finding, findings_of

ROOT = Path(__file__).resolve().parents[2]
RUNS: dict[str, Any] = yaml.safe_load((ROOT / "scripts/broken_runs/runs.yaml").read_text(encoding="utf-8"))
RECORD = ROOT / "scripts/broken_runs/record.json"
PAGE = ROOT / "docs/when-it-does-not-learn.md"
BEGIN, END = "<!-- broken runs: written by scripts/broken_runs/record.py -->\n", "<!-- end of the broken runs -->\n"


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    names = [] if arguments == ["--page"] else arguments or list(RUNS["broken"])
    silent = []
    with tempfile.TemporaryDirectory() as folder:
        start = start_policy(Path(folder)) if names else None
        for name in names:
            found = broken(name, Path(folder), start)
            silent += [] if name in {finding.monitor for finding in found} else [name]
            record[name] = [{key: row[key] for key in ("step", "monitor", "since", "message")} for row in rows(found)]
            print(name, *(f"  step {f.step}, {f.monitor}: {f.message}" for f in found), sep="\n", flush=True)
    record = {name: record[name] for name in RUNS["broken"] if name in record}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), block(record)), encoding="utf-8")
    if silent:
        print("did not fire:", *silent)
    return int(bool(silent))


def rows(found: list[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON."""
    return [finding.to_json() for finding in found]


def start_policy(folder: Path) -> Path:
    """The model that the runs begin with, trained by imitation for some steps."""
    trained(merge(RUNS["start"], {"run": {"dir": str(folder)}}))
    return folder / "start/checkpoints/step-80/model"


def healthy(folder: Path, start: Path) -> list[Finding]:
    """What the monitors say of the run that is not broken."""
    return trained(tree_of("healthy", {}, folder, start))


def broken(name: str, folder: Path, start: Path | None) -> list[Finding]:
    """What the monitors say of the run that is broken for the monitor `name`, until that one speaks."""
    run = RUNS["broken"][name]
    if "made_up" in run:
        return findings_of([{"step": step, **run["made_up"]} for step in range(1, 21)])
    return trained(tree_of(name, {**run["change"], "health": {name: "stop"}}, folder, start))


def tree_of(name: str, change: Mapping[str, Any], folder: Path, start: Path | None) -> dict[str, Any]:
    """The configuration of a run in the folder."""
    own = {"run": {"dir": str(folder), "name": name}, "model": {"path": str(start)}}
    return merge(merge(RUNS["healthy"], own), change)


def trained(tree: Mapping[str, Any]) -> list[Finding]:
    """Train; what the monitors said."""
    from rlvr.trainer import GRPOTrainer

    with GRPOTrainer(config=tree) as trainer:
        try:
            trainer.train()
        except TrainingError as error:
            if "health." not in str(error):
                raise
        return [Finding.from_json(row) for row in trainer.folder.health.rows()]


def block(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    parts = []
    for name, run in RUNS["broken"].items():
        said = [
            f"    step {row['step']}, {row['monitor']}: {row['message']}{since(row)}" for row in record.get(name, [])
        ]
        parts.append(f"`{name}`: {run['what']}.{change(run)}\n\n" + "\n".join(said) + "\n")
    return "\n".join(parts)


def change(run: Mapping[str, Any]) -> str:
    """What of the healthy run's settings was changed, as YAML; nothing for a run that is made up."""
    if "change" not in run:
        return ""
    lines = [
        f"{key}: {yaml.safe_dump(value, default_flow_style=True, width=1000)}" for key, value in run["change"].items()
    ]
    return "\n\n```yaml\n" + "".join(lines).replace("...\n", "") + "```"


def since(row: Mapping[str, Any]) -> str:
    """Since which step, as the console says it."""
    return "" if row["since"] >= row["step"] else f" (since step {row['since']})"


def with_block(page: str, text: str) -> str:
    """The page with the text between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
