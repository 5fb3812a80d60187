"""Lines on the screen about what a command or a trainer does before its first step: libraries, model, tasks, engine.

The library logs the phases as INFO records of the logger `rlvr.startup`, which nobody sees by default; a command, and a
trainer that is made from Python, show them with the seconds since its begin.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import time
from typing import TextIO

startup = logging.getLogger("rlvr.startup")
"""`startup.info("loading the model %s", path)`, at the begin of a phase."""


class StartupLines(logging.Handler):
    """Shows the phases in the block; nothing in the modes `off` and `quiet` of the console, and on ranks other than the
    first. Inside the block of another one it shows nothing: the outer one does."""

    def __init__(self, mode: str, file: TextIO | None = None) -> None:
        super().__init__(logging.INFO)
        self._shown = mode not in ("off", "quiet") and os.environ.get("RANK", "0") == "0"
        self._file = file
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Show a line."""
        if not self._shown:
            return
        try:
            stream = self._file or sys.stdout
            line = f"{time.monotonic() - self._began:5.1f} s  {text}"
            if stream.isatty():
                line = _wrapped(line)
            print(line, file=stream, flush=True)
        # A stream that is gone, or cannot encode a path: the run goes on without its lines.
        except (OSError, ValueError):
            self._shown = False

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        self.say(record.getMessage())

    def __enter__(self) -> StartupLines:
        if any(isinstance(handler, StartupLines) for handler in startup.handlers):
            return self
        startup.addHandler(self)
        startup.setLevel(logging.INFO)
        # The command's own handler of warnings would show each line again, on every rank.
        startup.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        if self not in startup.handlers:
            return
        startup.propagate = True
        startup.removeHandler(self)


def _wrapped(line: str) -> str:
    """The line wrapped by words to the width of the terminal, indented below its text; paths stay whole."""
    columns = max(shutil.get_terminal_size().columns, 40)
    return textwrap.fill(line, columns, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
