"""Destinations of metrics: the run folder's metrics.jsonl, and the protocol of everything else that wants them.

Invariants:
- metrics.jsonl is the run's own record: one JSON object per step, in order, whole after each line, its loss an error.
- A tracker runs in the background (`rlvr.monitor.background_trackers`): what it raises and how long it takes never
  reaches the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError, DataError, TrainingError
from rlvr.monitor.console_text import clean
from rlvr.monitor.whole_file import folder_gone, write_whole


class Tracker(Protocol):
    """Somewhere else that a run's metrics are shown. All its methods are called from one thread, which is not the
    loop's."""

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """Begin; `run` is the resolved configuration, `directory` the run folder. A resumed run starts in the same
        folder."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step's metrics; None values are not computed."""

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sample rollouts as flat rows with the same keys (see `monitor.batch.sample_rows`)."""

    def finish(self) -> None:
        """Send what is left, and end."""


def require(package: str, extra: str) -> None:
    """ConfigError, which names the extra, where a tracker's package is not installed. Imports nothing."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigError(f"logging to {extra} needs the package {package}: {install_command(extra)}")


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns of sample rollouts, which are the keys of the first row, and their values with texts cleaned."""
    columns = list(rows[0])
    return columns, [[clean(row[c]) if isinstance(row.get(c), str) else row.get(c) for c in columns] for row in rows]


class MetricsFile:
    """The file of one JSON object per step. It is opened for each line, so another program sees the line when `append`
    returns; a checkpoint, not each line, flushes it to the disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one step's record (see `monitor.metrics.record`). ValueError for a NaN or an infinity, TrainingError
        when it cannot be written; then the file is as it was, and a folder that is gone is not made again."""
        # NaN is no JSON: `metrics.record` has replaced it by null, so one that arrives here is a defect.
        line = json.dumps(row, allow_nan=False)
        size = 0
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except FileNotFoundError as error:  # of the folder, since a file that is not there is made
            raise folder_gone(self.path.parent) from error
        except OSError as error:
            # A full disk may have taken half of the line. Truncated, the file is whole again; where that fails too,
            # readers pass over the half line.
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            raise TrainingError(
                f"{self.path} cannot be written: {error.strerror}. Free some space there and go on with --resume auto"
            ) from error

    def rows(self) -> Iterator[dict[str, Any]]:
        """The records, in order. A last line that a kill left half written is passed over.

        DataError, with file and line, for a whole line that is no record.
        """
        if not self.path.exists():
            return
        # Bytes that a crash of the machine garbled are refused as JSON, not as text.
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                # Lines are appended whole with their newline, so only a killed process leaves one without.
                if not line.endswith("\n"):
                    return
                try:
                    row = json.loads(line)
                    int(row["step"])
                except (ValueError, TypeError, KeyError) as error:
                    raise DataError(f"{self.path}, line {number}: not a metrics record; remove the line") from error
                yield row

    def lines(self) -> int:
        """The number of whole lines."""
        if self.path.exists():
            return self.path.read_bytes().count(b"\n")
        return 0

    def truncate_after(self, step: int) -> None:
        """Cut the lines past `step`, and a half-written last one: a run resumed from there writes them anew."""
        if self.path.exists():
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step))
