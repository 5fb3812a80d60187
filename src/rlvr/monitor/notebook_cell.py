"""The progress of a run in one output of a notebook cell, which is replaced as the run goes on.

Invariants: text from outside reaches the page as text, never as markup. Rows update the output at most four times a
second; it is whole when a call of `train` ends.
"""

from __future__ import annotations

import html
import sys
import time
from collections import deque
from typing import Any

# As many as fit in a cell without scrolling; metrics.jsonl has all of them.
ROWS = 10
"""Newest rows of steps that are shown."""
LINES = 200
"""Newest other lines (the plan, evaluations, samples, warnings) that are shown."""
# Four times a second, as the live view of a terminal has it.
INTERVAL = 0.25
"""Seconds between updates."""


def in_notebook() -> bool:
    """Return True in the kernel of a notebook, whose cells have outputs that can be replaced."""
    # Who runs in a notebook has imported IPython.
    module = sys.modules.get("IPython")
    if module is None:
        return False
    shell = module.get_ipython()
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class NotebookCell:
    """One output at a time: `finish` ends it, and the next line begins another, in the cell that runs then."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0
        self._begin()

    def _begin(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        self._rows: deque[str] = deque(maxlen=ROWS)
        self._title = ""
        self._place = ""
        self._done = 0
        self._total = 0

    def line(self, text: str) -> None:
        """Show a line that stays."""
        self._lines.append(text.rstrip("\n"))
        # Outside of a run nothing follows that would show it.
        self._show(at_once=True)

    def row(self, title: str, row: str, place: str, done: int, total: int) -> None:
        """Show the row of a step under its title; `place` says how far the run is, `done` of `total` steps (0: nobody
        knows)."""
        self._title = title
        self._rows.append(row)
        self._place = place
        self._done = done
        self._total = total
        self._show()

    def finish(self) -> None:
        """Show what is not shown yet, and end the output."""
        if self._handle is not None:
            self._show(at_once=True)
        self._handle = None
        self._begin()

    def _show(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._handle is not None and not at_once and now - self._shown < INTERVAL:
            return
        self._shown = now
        if self._handle is None:
            # The kernel's own package, in memory where this runs.
            from IPython.display import display

            self._handle = display(self._contents(), raw=True, display_id=True)
        else:
            self._handle.update(self._contents(), raw=True)

    def _contents(self) -> dict[str, str]:
        """The output as HTML, and as text for viewers without it."""
        table = [self._title, *self._rows] if self._rows else []
        text = "\n".join([*self._lines, *([self._place] if self._place else []), *table])
        bar = ""
        if self._total:
            bar = f'<progress value="{self._done}" max="{self._total}" style="width: 20em"></progress> '
        parts = [f"<pre>{html.escape(chr(10).join(self._lines))}</pre>"]
        if self._place:
            parts.append(f"<div>{bar}{html.escape(self._place)}</div>")
        if table:
            parts.append(f"<pre>{html.escape(chr(10).join(table))}</pre>")
        return {"text/plain": text, "text/html": "\n".join(parts)}
