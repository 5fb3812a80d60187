"""Output of findings: the console, and `health.jsonl` of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.monitor.console import Console
from rlvr.monitor.health.series import Finding
from rlvr.monitor.health.watch import Watch, checked_modes
from rlvr.monitor.trackers import MetricsFile
from rlvr.records import Batch


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
        for finding in findings:
            self._say(finding)
        return next((finding for finding in findings if finding.mode == "stop"), None)

    def _say(self, finding: Finding) -> None:
        # Rank 0 alone has the file. Every rank runs the monitors on the same rows, so that all of them end together
        # under `stop`.
        if self._file is not None:
            self._file.append(finding.to_json())
            self._console.message(f"step {finding.step}, {finding}", "warning")
            for example in finding.examples:
                self._console.message(f"    {example}")
