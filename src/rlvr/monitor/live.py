"""The live part of a terminal: the stage's bar, bars inside the step, and the last warning of a monitor.

Invariants:
- It is drawn by a thread of its own, which only reads counters.
- Lines are printed above it, and it is removed at the end.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Counts = Callable[[], Mapping[str, tuple[int, int]]]
"""Progress inside a step: name -> (done, requested), both since the run began."""


class LiveView:
    """The view of one stage of `steps` steps, `done` of them before; `counts` is asked at each refresh."""

    def __init__(self, output: RichConsole, stage: str, steps: int | None, done: int, counts: Counts) -> None:
        self._steps = _stage_bar(output)
        self._steps.add_task(stage, total=steps, completed=done)
        self._within = Progress(
            TextColumn("  {task.description}", markup=False), BarColumn(), MofNCompleteColumn(), console=output
        )
        self._bars: dict[str, TaskID] = {}
        self._counts = counts
        self._before = dict(counts())
        self._note: Text | None = None
        # Four frames a second, as rich has it by default: each frame holds the console's lock, for which the loop's
        # thread waits when it prints a line.
        self._live = Live(console=output, get_renderable=self._view, transient=True, refresh_per_second=4)
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self) -> None:
        """Show the view; log handlers that write to the terminal write above it from here on."""
        # Live.start replaces sys.stdout and sys.stderr. A handler that holds the old stream would write into the bars,
        # so each is moved to the stream that now stands under the same name.
        before = {id(stream): name for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
        self._live.start()
        for handler in [*logging.getLogger("rlvr").handlers, *logging.getLogger().handlers]:
            if isinstance(handler, logging.StreamHandler) and (name := before.get(id(handler.stream))):
                self._moved.append((handler, handler.setStream(getattr(sys, name))))

    def stop(self) -> None:
        """Remove the view, and give log handlers their streams back."""
        while self._moved:
            handler, stream = self._moved.pop()
            if stream is not None:
                handler.setStream(stream)
        self._live.stop()

    def step(self) -> None:
        """Advance the stage's bar by one step."""
        self._steps.advance(TaskID(0))
        self.again()

    def again(self) -> None:
        """Start the bars of the work inside a step from zero."""
        # Counters run on over the whole run; the bars show what was done since this point.
        self._before = {name: (done, done) for name, (done, _) in self._counts().items()}

    def note(self, text: Text) -> None:
        """Keep a line in view until the next one."""
        self._note = text

    def _view(self) -> RenderableType:
        for name, (done, requested) in self._counts().items():
            before = self._before.get(name, (0, 0))[0]
            if name not in self._bars:
                self._bars[name] = self._within.add_task(name)
            self._within.update(self._bars[name], completed=done - before, total=max(requested - before, 0))
        shown: list[RenderableType] = [self._steps.get_renderable()]
        if self._bars:
            shown.append(self._within.get_renderable())
        return Group(*shown, *([self._note] if self._note is not None else []))


def _stage_bar(output: RichConsole) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("step"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Steps may take many minutes each, and the time left is estimated over this window.
    return Progress(*columns, console=output, speed_estimate_period=24 * 3600)
