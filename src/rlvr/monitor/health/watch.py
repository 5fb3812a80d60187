"""Runs the monitors over the steps of a run, each stage by itself, and reports each cause once.

Invariant: what it finds depends on the rows alone, so that it needs no place in a checkpoint: after a resume the rows
of the steps before are gone through again without a report. Output goes to the console and to `health.jsonl` of the run
folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from rlvr.errors import nearest
from rlvr.monitor.console import Console
from rlvr.monitor.console_text import clean, shorten
from rlvr.monitor.health.catalogue import MONITORS
from rlvr.monitor.health.monitors import Entry, Finding, Monitor, Series
from rlvr.monitor.samples import in_turns
from rlvr.monitor.trackers import MetricsFile
from rlvr.records import Batch

Mode = Literal["warn", "stop", "off"]
MODES: tuple[str, ...] = get_args(Mode)
DEFAULT = "default"
"""The key of the mode of all monitors that are not named."""
# Enough to see whether a pattern repeats; each takes a line of up to 560 characters on the console.
EXAMPLES = 3


def checked_modes(written: str | Mapping[str, str]) -> dict[str, str]:
    """The mode of each monitor, from one word or from words by name. ValueError for an unknown name or word."""
    if isinstance(written, str):
        modes = {DEFAULT: written}
    else:
        modes = dict(written)
    # A key over a bare word keeps the word under `name` (see rlvr.core.tree.merge).
    modes = {DEFAULT: modes.pop("name", "warn"), **modes}
    # `default` may be set to any mode; a misspelt monitor must not be silently without effect.
    for name, mode in modes.items():
        if name not in (*MONITORS, DEFAULT):
            raise ValueError(f"no monitor is called {name!r}{nearest(name, [*MONITORS, DEFAULT])}")
        if mode not in MODES:
            raise ValueError(f"{name} is {mode!r}, not one of {', '.join(MODES)}")
    return {name: modes.get(name, modes[DEFAULT]) for name in MONITORS}


class Watch:
    """The monitors of a run, `modes` being what `checked_modes` gave."""

    def __init__(self, modes: Mapping[str, str]) -> None:
        self._modes = dict(modes)
        self._stage: Any = None
        self._open: list[tuple[Monitor, Series]] = []
        self._seen = 0

    def look(self, rows: Sequence[Mapping[str, Any]], batch: Batch | None = None) -> list[Finding]:
        """Return the findings of the newest of the run's `rows`; `batch` is that step's, for examples."""
        findings: list[Finding] = []
        # After a resume `rows` begins with all recorded steps. They go through the monitors too, but only the findings
        # of the last row are returned: earlier ones were reported before.
        for row in rows[self._seen :]:
            findings = self._step(row)
        self._seen = len(rows)
        return [dataclasses.replace(f, examples=_examples(MONITORS[f.monitor], batch)) for f in findings]

    def _step(self, row: Mapping[str, Any]) -> list[Finding]:
        if row.get("run/stage") != self._stage or not self._seen:
            # A stage begins: other data, other lengths, all monitors afresh.
            self._stage = row.get("run/stage")
            self._open = [(m, Series(m.keep)) for m in MONITORS.values() if self._modes[m.name] != "off"]
        self._seen += 1
        findings: list[Finding] = []
        # A copy, since a monitor that has spoken is removed: each cause is reported once a stage.
        for monitor, series in list(self._open):
            values = monitor.entry(row)
            if values is None:
                continue
            series.add(Entry(int(row["step"]), values))
            trouble = monitor.look(series)
            if trouble is not None:
                self._open.remove((monitor, series))
                message = monitor.message.format(**trouble.numbers)
                mode = self._modes[monitor.name]
                findings.append(Finding(int(row["step"]), monitor.name, trouble.since, message, monitor.advice, mode))
        return findings


def findings_of(rows: Iterable[Mapping[str, Any]], modes: Mapping[str, str] | None = None) -> list[Finding]:
    """All that the monitors find in the rows of a run."""
    watch = Watch(modes or checked_modes("warn"))
    so_far = []
    findings = []
    for row in rows:
        so_far.append(row)
        findings += watch.look(so_far)
    return findings


def _examples(monitor: Monitor, batch: Batch | None) -> tuple[str, ...]:
    """Three completions of the step, of different tasks where there are such, each with the reason of its verdict."""
    if monitor.examples is None or batch is None:
        return ()
    fitting = [(r, r.verdict.reason) for r in batch.rollouts if r.verdict and str(r.verdict.status) == monitor.examples]
    examples = []
    for rollout, reason in in_turns(fitting, lambda one: one[0].task.id)[:EXAMPLES]:
        # One line each, however many they were written in.
        text = " ".join(clean(shorten(rollout.text.strip(), 160)).split())
        why = " ".join(clean(shorten(reason, 400)).split())
        examples.append(f"task {clean(rollout.task.id)}: {text or '(empty)'} -> {why}")
    return tuple(examples)


class Health:
    """The monitors of a run, `modes` as the configuration writes them. `file` is None on ranks other than 0: these
    report nothing."""

    def __init__(self, modes: str | Mapping[str, str], console: Console, file: MetricsFile | None) -> None:
        self._watch = Watch(checked_modes(modes))
        self._console = console
        self._file = file

    def step(self, rows: Sequence[Mapping[str, Any]], batch: Batch) -> Finding | None:
        """Report what the monitors find after the newest of `rows`; return the finding that ends the run, if any."""
        findings = self._watch.look(rows, batch)
        # Rank 0 alone has the file. Every rank runs the monitors on the same rows, so that all of them end together
        # under `stop`.
        if self._file is not None:
            for finding in findings:
                self._file.append(finding.to_json())
                self._console.message(f"step {finding.step}, {finding}", "warning")
                for example in finding.examples:
                    self._console.message(f"    {example}")
        return next((finding for finding in findings if finding.mode == "stop"), None)
