"""A run folder as data, read leniently: every part may be missing, torn, or written by another version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.core.tree import read_mapping
from rlvr.errors import ConfigError, DataError
from rlvr.monitor.health import MONITORS, Finding, findings_of
from rlvr.monitor.recording import rollout_files

PARTS = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "rollouts")


@dataclass
class RunData:
    """The files of a run, as read."""

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One per step, in order."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Messages about what could not be read."""

    @property
    def rollout_files(self) -> list[tuple[int, Path]]:
        """Step and file of the recorded rollouts, in order of steps."""
        return list(rollout_files(self.path).items())


def read_run(path: str | Path) -> RunData:
    """The run in a folder. DataError where it holds nothing of a run."""
    path = Path(path)
    if not any((path / part).exists() for part in PARTS):
        raise DataError(f"{path} is not a run folder: it holds none of {', '.join(PARTS)}")
    run = RunData(path.resolve().name, path)
    run.config = _config(run)
    by_step = {row["step"]: row for row in read_lines(path / "metrics.jsonl", run.notes) if _is_step(row.get("step"))}
    # In order; of a step written twice, the last.
    run.rows = [by_step[step] for step in sorted(by_step)]
    if not run.rows:
        run.notes.append("no finished step: metrics.jsonl is missing or empty")
    run.evaluations = [row for row in read_lines(path / "evaluations.jsonl", run.notes) if _is_step(row.get("step"))]
    # Runs of before there was evaluations.jsonl have the results in the rows of their steps.
    if not run.evaluations:
        run.evaluations = [row for row in run.rows if any(k.startswith("eval/") and row[k] is not None for k in row)]
    run.findings = _findings(run)
    if not run.rollout_files:
        run.notes.append(
            "no recorded rollouts: rollouts/ is missing or empty (logging.rollouts says how often they are)"
        )
    return run


def read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; lines that are none are counted in a note."""
    if not path.is_file():
        return
    bad = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                bad += 1
                continue
            if isinstance(row, dict):
                yield row
            else:
                bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} {'line' if bad == 1 else 'lines'} could not be read and are left out")


def _config(run: RunData) -> dict[str, Any]:
    file = run.path / "config.yaml"
    if not file.is_file():
        run.notes.append("config.yaml is missing")
        return {}
    try:
        return read_mapping(file)
    except ConfigError as error:
        run.notes.append(f"the configuration could not be read: {error}")
        return {}


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _findings(run: RunData) -> list[Finding]:
    """The findings of the run's monitors; for a run from before there were monitors, those that they would have had."""
    file = run.path / "health.jsonl"
    if file.is_file():
        findings = []
        for row in read_lines(file, run.notes):
            try:
                findings.append(Finding.from_json(row))
            # `Finding(**row)` with a field that this version does not know, or without one that it needs.
            except TypeError:
                run.notes.append("health.jsonl: a line of another version is left out")
        return findings
    modes = run.config.get("health", "warn")
    # YAML reads an unquoted `off` as False.
    if modes == "off" or modes is False:
        return []
    try:
        return findings_of(run.rows)
    except (TypeError, ValueError, KeyError):  # rows of another version, whose values are of other types
        run.notes.append("the monitors could not read metrics.jsonl")
        return []


def reads(finding: Finding) -> list[str]:
    """The metrics whose curves a finding concerns."""
    if finding.monitor in MONITORS:
        return list(MONITORS[finding.monitor].reads)
    return []
