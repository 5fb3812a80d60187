"""The console of a run: a live view and a table on a terminal, plain lines anywhere else.

Invariants:
- In a notebook lines and rows go to one output of the cell, which is replaced in place (`notebook_cell`).
- Both say the same. Plain output has no control characters and no wrapping: for logs, pipes and notebooks.
- Text from outside (prompts, completions, reasons, names) is cleaned and shown as `rich.text.Text`, never as markup.
- The live view is drawn by a thread of its own, which only reads counters; lines are printed above it, and it is
  removed at the end.
- No method raises for its contents. When the stream itself is gone, the console is switched off and one warning is
  logged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rlvr.monitor.console_text import (
    TREND,
    Cells,
    aligned_row,
    clean,
    duration,
    encodable,
    evaluation_lines,
    fitting,
    number,
    step_cells,
    trend_scale,
)
from rlvr.monitor.notebook_cell import NotebookCell, in_notebook
from rlvr.monitor.samples import sample_blocks
from rlvr.records import Batch

logger = logging.getLogger(__name__)

Mode = Literal["auto", "plain", "quiet", "off"]
Level = Literal["info", "warning", "error"]

_LEVELS = {"info": "", "warning": "yellow", "error": "bold red"}
# Characters of a column of a table that is not folded beside a longer one.
_WHOLE = 24
# Rows after which the header is printed again, so that one is always in view on a terminal of 24 lines.
_HEADER_EVERY = 20
# Seconds between the rows of steps without rewards (SFT), of which there are many a second at toy size.
_THINNED = 2.0


class Console:
    """Shows a run. `mode` auto is a live view where the stream is a terminal, else plain; `quiet` shows warnings,
    errors and the last line; `off` shows nothing.

    `samples_every` counts steps (0: no samples), `file` defaults to the standard output of the moment; `counts`
    says how far sampling and verifying are.
    """

    def __init__(
        self, mode: Mode = "auto", samples_every: int = 10, file: TextIO | None = None, counts: Counts = dict
    ) -> None:
        self.samples_every = samples_every
        self._counts = counts
        self._off = mode == "off"
        self._quiet = mode == "quiet"
        # `file` is looked up now and not as a default: pytest and notebooks replace sys.stdout after this import.
        stream = file or sys.stdout
        # Colours that FORCE_COLOR asks for in a pipe are no terminal.
        self._live = mode == "auto" and stream.isatty() and RichConsole(file=stream).is_interactive
        self._output = _output(file, self._live)
        self._cell = NotebookCell() if mode == "auto" and file is None and in_notebook() else None
        self._view: LiveView | None = None
        self._rewards: deque[float] = deque(maxlen=TREND)
        self._range: tuple[float, float] | None = None
        self._titles: list[str] = []
        self._rows = 0
        self._stage = "run"
        self._total = 0
        self._done = 0
        self._resumed = 0
        self._before = 0
        self._last_step = 0
        self._began = time.monotonic()
        self._run_began: float | None = None
        self._row_at = -math.inf
        self._thinned: Mapping[str, Any] | None = None
        self._held: list[str] = []

    def start(self, plan: str | Iterable[str]) -> None:
        """Print the plan of the run, line by line."""
        for line in plan.splitlines() if isinstance(plan, str) else plan:
            self._say(line)

    def stage(self, name: str, steps: int | None, done: int = 0, of_run: int | None = None) -> None:
        """Begin a stage of `steps` steps (None: until a criterion), `done` of them before this process started, when
        the run has done `of_run` (None: it has no other stage). Bars and rows count the steps of the run."""
        self._flush()
        self._stage = clean(name)
        self._total = steps or 0
        self._done = done
        self._resumed = done
        self._before = 0 if of_run is None else of_run - done
        self._last_step = self._before + done
        self._began = time.monotonic()
        if self._run_began is None:
            self._run_began = self._began
        self._row_at = -math.inf
        self._rewards.clear()
        self._range = None
        if not self._live:
            self._say(f"stage {name}: {steps or 'any number of'} steps" + (f", {done} of them done" if done else ""))
            return
        self._end_view()
        if not self._off:
            title = encodable(self._stage, self._output.encoding)
            self._view = LiveView(self._output, title, steps, done, self._counts, self._before, self._run_began)
            self._guard(self._view.start)

    def step(self, metrics: Mapping[str, Any], batch: Batch | None = None) -> None:
        """One line for a step's record, and a sample group of `batch` every `samples_every` steps.

        Steps without a reward, as those of SFT, have a line every two seconds, and the first and the last of a stage.
        """
        self._done += 1
        self._last_step = metrics.get("step") or self._before + self._done
        reward = metrics.get("reward/mean")
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
            low, high = self._range or (reward, reward)
            self._range = min(low, reward), max(high, reward)
        now = time.monotonic()
        self._thinned = metrics
        if reward is not None or self._held or self._done == self._total or now - self._row_at >= _THINNED:
            self._row_at = now
            self._flush()
        if self._view is not None:
            self._guard(self._view.step)
        if batch is not None and self.samples_every > 0 and (metrics.get("step") or 0) % self.samples_every == 0:
            for style, text in sample_blocks(batch):
                self._say(text, style)

    def _cell_row(self, cells: Cells) -> None:
        """The row of a step in the output of a notebook cell."""
        cell = self._cell
        assert cell is not None
        place = "  ".join(f"{title} {text}" for title, text in self._place().items())
        titles = aligned_row({title: title for title in cells})
        self._guard(lambda: cell.row(titles, clean(aligned_row(cells)), place, self._done, self._total))

    def _flush(self) -> None:
        """Print the newest step that has no line yet, and then the results that wait for it."""
        metrics = self._thinned
        self._thinned = None
        if metrics is not None:
            cells = step_cells(metrics, self._rewards, trend_scale(*self._range) if self._range else ())
            if self._live:
                self._row(cells)
            elif self._cell is not None:
                self._cell_row(cells)
            else:
                self._say("  ".join(f"{title} {text}" for title, text in {**self._place(), **cells}.items()))
        held = self._held
        self._held = []
        for line in held:
            self._say(line, "cyan")

    def _row(self, cells: Cells) -> None:
        """The table on a terminal: a header when the columns change and every so often, else a row."""
        cells = fitting(cells, self._output.width, aligned_row)
        if list(cells) != self._titles or self._rows % _HEADER_EVERY == 0:
            self._titles = list(cells)
            self._rows = 0
            self._say(aligned_row({title: title for title in cells}), "bold", cut=True)
        self._rows += 1
        self._say(aligned_row(cells), cut=True)

    def _place(self) -> Cells:
        """Return the cells of the bar on a terminal: the stage, step k/N of the run, the time elapsed since this call
        of `train` began, and that left until step N, the last one of the stage."""
        now = time.monotonic()
        since = self._began if self._run_began is None else self._run_began
        last = self._before + self._total if self._total else "?"
        cells = {self._stage: f"{self._before + self._done}/{last}", "elapsed": duration(now - since)}
        # Steps of this process only: those of an earlier one took its time, not ours.
        if self._total >= self._done > self._resumed:
            cells["left"] = duration((now - self._began) / (self._done - self._resumed) * (self._total - self._done))
        return cells

    @contextlib.contextmanager
    def evaluating(self, title: str, tasks: int | None, responses: int) -> Iterator[None]:
        """Show a bar of `responses` in the block, on a terminal; elsewhere a line at its begin."""
        if not self._live:
            counted = "" if tasks is None else f"{tasks} tasks, "
            self._say(f"{title}: {counted}{responses} responses")
        elif self._view is None and not self._off:
            # Before the first stage, or outside a run.
            self._view = LiveView(self._output, None, None, 0, self._counts)
            self._guard(self._view.start)
        view = self._view
        if view is not None:
            view.evaluating(encodable(clean(title), self._output.encoding), responses)
        try:
            yield
        finally:
            if view is not None:
                view.again()
                if not view.has_stage:
                    self.finish()

    def evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """The results of an evaluation, below the line of its step: shares in percent."""
        first, *parts = evaluation_lines(results)
        self._held += [f"evaluation at step {step}  {first}".rstrip(), *parts]
        # The step's own line is shown afterwards.
        if step <= self._last_step:
            self._flush()

    def message(self, text: str, level: Level = "info") -> None:
        """Print a line. A warning or an error is labelled, is shown in quiet mode too, and stays in the live view."""
        labelled = text if level == "info" else f"{level}: {text}"
        self._say(labelled, _LEVELS.get(level, ""), always=level != "info")
        if self._view is not None and level != "info":
            line = self._text(" ".join(labelled.split()), _LEVELS[level])
            line.no_wrap = True
            line.overflow = "ellipsis"
            self._view.note(line)

    def closing(self, text: str) -> None:
        """The last line of a run, which quiet mode shows too."""
        self._say(text, always=True)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A titled table; numbers to three digits, None as `-`."""
        if self._quiet:
            return
        self._say(title, "bold")
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        cells = [[self._text(number(value)) for value in row] for row in rows]
        widths = [max([len(column), *map(len, below)]) for column, *below in zip(columns, *cells, strict=True)]
        for column, width in zip(columns, widths, strict=True):
            # Where the terminal is narrow a long text is folded, and the numbers beside it stay whole.
            table.add_column(self._text(column), overflow="fold", no_wrap=width <= _WHOLE < max(widths))
        for row in cells:
            table.add_row(*row)
        self._print(table)

    def finish(self) -> None:
        """Take the live view away and give the terminal back; may be called twice."""
        self._end_view()
        self._run_began = None

    def _end_view(self) -> None:
        self._flush()
        # Set to None first: a message that `stop` makes rich print would otherwise go to a view that is ending.
        if self._cell is not None:
            self._guard(self._cell.finish)
        view = self._view
        self._view = None
        if view is not None:
            self._guard(view.stop)

    def _text(self, text: object, style: str = "") -> Text:
        return Text(encodable(clean(text), self._output.encoding), style=style)

    def _say(self, text: object, style: str = "", cut: bool = False, always: bool = False) -> None:
        """Print text, in quiet mode only what is `always` shown; on a terminal it is wrapped, or cut at the edge."""
        if self._quiet and not always:
            return
        cell = self._cell
        if cell is not None:
            self._guard(lambda: cell.line(clean(text)))
            return
        # The same text as rich would print, at a tenth of its time.
        if not self._live:
            self._guard(lambda: self._output.write_line(encodable(clean(text), self._output.encoding)))
            return
        how: dict[str, Any] = {"no_wrap": True, "overflow": "crop"} if cut else {}
        self._print(self._text(text, style), **how)

    def _print(self, what: RenderableType, **how: Any) -> None:
        cell = self._cell
        if cell is not None:
            with self._output.capture() as captured:
                self._output.print(what)
            self._guard(lambda: cell.line(captured.get()))
            return
        self._guard(functools.partial(self._output.print, what, soft_wrap=not self._live, **how))

    def _guard(self, show: Callable[[], object]) -> None:
        if self._off:
            return
        try:
            show()
        # A closed pipe, a closed file, a terminal that went away: the run goes on without its console.
        # ValueError is Python's "I/O operation on closed file".
        except (OSError, ValueError) as error:
            self._off = True
            logger.warning("the console cannot be written to and is off: %s: %s", type(error).__name__, error)


class _Output(RichConsole):
    """rich's console without its exit on a closed pipe."""

    def write_line(self, text: str) -> None:
        """A line of plain text."""
        try:
            self.file.write(text + "\n")
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        # What is still buffered must go somewhere when Python flushes it at exit, or the exit status would be 120.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        raise BrokenPipeError("the reader of the pipe has gone")


def _output(file: TextIO | None, live: bool) -> _Output:
    if live:
        plain: dict[str, Any] = {}
    else:
        # Tables alone are laid out to a width; 160 holds those of rlvr.replay in a log.
        plain = {"force_terminal": False, "color_system": None, "width": 160}
    # A notebook gets lines of text, not an HTML block for each.
    return _Output(file=file, force_jupyter=False, markup=False, highlight=False, emoji=False, **plain)


Counts = Callable[[], Mapping[str, tuple[int, int]]]
"""Progress inside a step: name -> (done, requested), both since the run began."""


class LiveView:
    """The view of one stage of `steps` steps, `done` of them before this process and `before` in earlier stages; of
    nothing but an evaluation where `stage` is None. `counts` is asked at each refresh; `began` is the time of
    `time.monotonic` that elapsed time is counted from, None for now."""

    def __init__(
        self,
        output: RichConsole,
        stage: str | None,
        steps: int | None,
        done: int,
        counts: Counts,
        before: int = 0,
        began: float | None = None,
    ) -> None:
        self.has_stage = stage is not None
        self._steps = _stage_bar(output)
        if stage is not None:
            began = time.monotonic() if began is None else began
            self._steps.add_task(stage, total=steps, completed=done, before=before, began=began)
        self._within = _bars(output)
        self._bars: dict[str, TaskID] = {}
        self._evaluation: tuple[Progress, int] | None = None
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
        """Start the bars of the work inside a step from zero; an evaluation is over."""
        # Counters run on over the whole run; the bars show what was done since this point.
        self._before = {name: (done, done) for name, (done, _) in self._counts().items()}
        self._evaluation = None

    def evaluating(self, title: str, responses: int) -> None:
        """Show one bar of `responses` verified, in place of those inside a step, until `again`."""
        self.again()
        bar = Progress(*_TIMED, console=self._live.console)
        bar.add_task(title, total=responses)
        self._evaluation = bar, self._done()

    def _done(self) -> int:
        """Responses verified since the run began; sampled ones where nothing is verified."""
        counts = self._counts()
        return counts.get("verifying", counts.get("sampling", (0, 0)))[0]

    def note(self, text: Text) -> None:
        """Keep a line in view until the next one."""
        self._note = text

    def _view(self) -> RenderableType:
        shown: list[RenderableType] = []
        if self.has_stage:
            shown.append(self._steps.get_renderable())
        if self._evaluation is not None:
            bar, before = self._evaluation
            bar.update(TaskID(0), completed=self._done() - before)
            shown.append(bar.get_renderable())
        elif any([*self._update_bars()]):  # each bar is updated, also behind the first that has work
            shown.append(self._within.get_renderable())
        return Group(*shown, *([self._note] if self._note is not None else []))

    def _update_bars(self) -> Iterator[bool]:
        """For each kind of work inside a step: has this step any? SFT samples nothing, and has no bars."""
        for name, (done, requested) in self._counts().items():
            before = self._before.get(name, (0, 0))[0]
            if name not in self._bars:
                self._bars[name] = self._within.add_task(name)
            has_work = requested > before
            total = max(requested - before, 0)
            self._within.update(self._bars[name], completed=done - before, total=total, visible=has_work)
            yield has_work


class _Steps(ProgressColumn):
    """`step 312/390`: steps of the run, as the rows count them, up to the last one of the stage."""

    def render(self, task: Task) -> Text:
        last = "?" if task.total is None else str(task.fields["before"] + int(task.total))
        return Text(f"step {task.fields['before'] + int(task.completed)}/{last}")


class _Elapsed(ProgressColumn):
    """The time since the task's `began`, a time of `time.monotonic`: of the run, as the count of steps beside it."""

    def render(self, task: Task) -> Text:
        return Text(duration(time.monotonic() - task.fields["began"]), style="progress.elapsed")


_TIMED = (
    TextColumn("  {task.description}", markup=False),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
)


def _bars(output: RichConsole) -> Progress:
    return Progress(TextColumn("  {task.description}", markup=False), BarColumn(), MofNCompleteColumn(), console=output)


def _stage_bar(output: RichConsole) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _Steps(),
        _Elapsed(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Steps may take many minutes each, and the time left is estimated over this window.
    return Progress(*columns, console=output, speed_estimate_period=24 * 3600)
