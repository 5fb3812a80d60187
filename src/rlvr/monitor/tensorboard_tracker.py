"""TensorBoard as a tracker: scalars by metric name, sample rollouts as text.

Files go to the run folder's `tensorboard/`, so that `tensorboard --logdir runs` shows all runs. A resumed run hides
what was logged past its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlvr.monitor.console_text import clean, shorten
from rlvr.monitor.trackers import require

# TensorBoard keeps the text of each step in its event file and sends whole tables to the browser: 32 rows of this size
# are 64 kB a column.
CELL = 2000
"""Characters of one cell of the table of rollouts."""
# torch's default is 120 s; a run that is looked at while it goes on should be less behind.
FLUSH = 30
"""Seconds after which what was logged is on disk."""


class TensorBoardTracker:
    """A tracker (see `monitor.trackers.Tracker`) that writes TensorBoard's event files.

    `directory` is where they go instead of the run folder; in it each run has a folder by its `name`. ConfigError when
    tensorboard is not installed.
    """

    def __init__(self, directory: str | None = None, name: str | None = None) -> None:
        require("tensorboard", "tensorboard")
        self.directory = directory
        self.name = name
        self._folder = Path()
        self._writer: Any = None
        self._config = ""

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """Remember where to write; the file is opened with the first step, which says what a resumed run hides."""
        self._folder = Path(directory) / "tensorboard"
        if self.directory is not None:
            self._folder = Path(self.directory) / (self.name or Path(directory).resolve().name)
        self._config = yaml.safe_dump(dict(run), sort_keys=False, allow_unicode=True)

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Everything from this step on that an earlier process logged is hidden.
            self._writer = SummaryWriter(str(self._folder), purge_step=step, flush_secs=FLUSH)
            self._writer.add_text("config", "\n".join(f"    {line}" for line in self._config.splitlines()), step)
        return self._writer

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step's numbers; None and texts are left out."""
        writer = self._open(step)
        for name, value in metrics.items():
            if isinstance(value, (bool, int, float)) and name != "step":
                writer.add_scalar(name, float(value), step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of sample rollouts in Markdown; its columns are the first row's keys."""
        if not rows:
            return
        columns = list(rows[0])
        lines = [_line(columns), _line(["---"] * len(columns)), *(_line([row.get(c) for c in columns]) for row in rows)]
        self._open(step).add_text("rollouts", "\n".join(lines), step)

    def finish(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def _line(cells: Sequence[Any]) -> str:
    """A row of a Markdown table. Its cells hold text of models and tasks, which must neither end the cell nor be
    markup."""
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: Any) -> str:
    text = ""
    if value is not None:
        text = clean(shorten(str(value), CELL))
    # & first, or the entities that follow would be escaped again.
    for sign, written in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "`": "&#96;", "\n": "<br>"}.items():
        text = text.replace(sign, written)
    return text
