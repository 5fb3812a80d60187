"""The code verifier: the program of a completion, run in a sandbox on the task's cases, and judged outside of it.

Invariants: nothing that a model wrote is parsed, compiled or run in this process; what is expected never reaches the
program; a program that exhausts its limits scores 0, a sandbox that fails leaves the verdict undecided.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.code.cases import Trial
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.credit import Credit, scored, tried
from rlvr.verifiers.code.extraction import NoProgramError, Which, find_program
from rlvr.verifiers.code.layout_fields import LayoutError
from rlvr.verifiers.code.layouts import Layout, read_layout
from rlvr.verifiers.code.programs import assembled
from rlvr.verifiers.code.runner import Limits
from rlvr.verifiers.code.shared import SandboxRequest, SharedRunner, missing_here, shared_runner
from rlvr.verifiers.code.steady import is_steady

# Arbitrary, above the tasks of a step. Tasks of EvalPlus may have megabytes, so not all tasks of a data set are kept.
MAX_LAYOUTS = 1024
"""Tasks whose layout is kept read, those last used."""


@register_verifier("code")
@dataclass
class CodeVerifier(Verifier):
    """The program that the completion holds passes the task's cases: programs, functions, assertions, a checker,
    properties.

    `task.info` says how it is tried (docs/code.md): `{"kind": "stdio", "cases": [{"input": ..., "output": ...}]}`,
    `function`, `asserts`, `humaneval`, `checker` or `property`. The program is the last fenced block, or the whole text
    where there is none. It runs in a sandbox, in a fresh process for each case; what it prints and returns is compared
    outside. Score 1 when all cases pass, or as `credit` says.
    """

    language: Literal["python", "c", "cpp", "javascript"] = "python"
    """Of programs whose task names no language."""
    block: Which = "last"
    """Of several fenced blocks that may be the program: the `last`, the `first`, or none at all (`only`)."""
    credit: Credit = "all"
    """The score: 1 or 0 (`all`), the `share` of cases that pass, or the share before the `first_failure`; both by
    weight."""
    case_time: float = 2.0
    """Seconds of wall clock for one case of a task that says nothing else."""
    memory_mb: int = 256
    """Memory of one run, where the task says nothing else."""
    total_time: float = 30.0
    """Seconds that all cases of one answer may take together, checkers included; those left over count as failed."""
    comparison: dict[str, Any] = field(default_factory=dict)
    """How outputs and values are compared, where the task says nothing else: `tolerance` (1e-6), `lines`,
    `ignore_case`, `strict_sequences`, `strict_numbers`."""
    max_length: int = 100_000
    """Characters of a program; a longer one is unparsable."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no program yet."""
    validate: bool = False
    """Run the solution that a task brings (`info["solution"]`, else its demonstration, else a text as answer): a task
    whose own solution does not score 1 is refused."""
    tier: str = "auto"
    """The sandbox: the strongest there is (`auto`), a tier by name, or the http address of a SandboxFusion."""
    unsafe: bool = False
    """Accept a sandbox of a lower tier than `full`."""
    workers: int | None = None
    """Programs that run at the same time; null: as many as there are cores."""
    time_limit: float = 3600.0
    """Seconds for one answer, the wait for a free sandbox included; past it the verdict is undecided."""

    needs: ClassVar[Needs] = Needs(remote=True)

    def __post_init__(self) -> None:
        for name in ("case_time", "memory_mb", "total_time", "max_length", "time_limit"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"code: {name}={getattr(self, name)} must be above 0")
        try:
            self._how = Comparison.read(self.comparison, Comparison())
        except ValueError as error:
            raise ConfigError(f"code: {error}") from None
        self._wanted = SandboxRequest(self.tier, self.unsafe, self.workers)
        self._layouts: OrderedDict[int, tuple[Task, Layout]] = OrderedDict()
        # Two locks: `_lock` is held for moments, around the table; `_reading` for as long as a task is parsed, which
        # takes up to a second. `quick` runs on the rollout's loop and must never wait for the second.
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._solutions: dict[str, str | None] = {}

    def prepare(self) -> None:
        """Open the sandbox. ConfigError where there can be none."""
        self._runner()

    def quick(self, task: Task, completion: str) -> Verdict | None:
        """The verdict where there is no program; None too while the task has not been read, which may take a second."""
        if self._cached_layout(task) is None:
            reading = None
        else:
            reading = self._read(task, completion)
        return reading if isinstance(reading, Verdict) else None

    def cache_key(self, task: Task, completion: str) -> Hashable | None:
        """The task and the program, where the same program surely does the same again."""
        if self._cached_layout(task) is None:
            reading = None
        else:
            reading = self._read(task, completion)
        if reading is None or isinstance(reading, Verdict):
            return None
        layout, program = reading
        # `is_steady` knows Python's words only, and a package may hold a source of randomness of its own.
        plain = layout.language == "python" and not layout.packages
        steady = plain and is_steady(program, (layout.prelude, layout.stub, layout.context))
        return (layout.digest, program) if steady else None

    async def verify(self, task: Task, completion: str) -> Verdict:
        """The verdict; many may wait at once, and the sandbox runs as many programs as it has workers."""
        has_layout = self._cached_layout(task) is not None
        if has_layout:
            reading = self._read(task, completion)
        else:
            reading = await asyncio.to_thread(self._read, task, completion)
        if isinstance(reading, Verdict):
            return reading
        layout, program = reading
        runner = self._runner()
        problem = self._missing(layout)
        if problem is None and self.validate:
            problem = await self._solution_problem(task, layout, runner)
        if problem:
            return Verdict.undecided(f"bad task: {problem}")
        return await self._judged(layout, program, runner)

    def check_task(self, task: Task) -> str | None:
        try:
            layout = self._layout(task)
        except LayoutError as error:
            return str(error)
        runner = self._runner()
        problem = self._missing(layout)
        if problem is None and self.validate:
            problem = runner.wait_for(self._solution_problem(task, layout, runner), self.time_limit)
        return problem

    def _missing(self, layout: Layout) -> str | None:
        """Return what the task needs and this sandbox has not. A service elsewhere has modules of its own."""
        here = not self.tier.startswith("http")
        return (layout.lacks if here else "") or missing_here(layout.language, layout.packages, self._wanted)

    def _runner(self) -> SharedRunner:
        return shared_runner(self._wanted)

    def _cached_layout(self, task: Task) -> Layout | None:
        """The task's layout, if it has been read."""
        with self._lock:
            entry = self._layouts.get(id(task))
            if entry is None:
                return None
            self._layouts.move_to_end(id(task))
            return entry[1]

    def _layout(self, task: Task) -> Layout:
        """The task's layout, which is read once. LayoutError."""
        if (layout_read := self._cached_layout(task)) is not None:
            return layout_read
        with self._reading:  # the others of a group wait, and find it read
            if (layout_read := self._cached_layout(task)) is not None:
                return layout_read
            layout = read_layout(task.info, self.language, self._how, task.prompt)
            with self._lock:
                self._layouts[id(task)] = task, layout  # the task is kept along, so that its id stays its own
                if len(self._layouts) > MAX_LAYOUTS:
                    self._layouts.popitem(last=False)
        return layout

    def _read(self, task: Task, completion: str) -> tuple[Layout, str] | Verdict:
        try:
            layout = self._layout(task)
        except LayoutError as error:
            return Verdict.undecided(f"bad task: {error}")
        try:
            program = find_program(
                completion,
                layout.language,
                self.block,
                self.think_opened_by_prompt,
                self.max_length,
                layout.entry_point,
            )
        except NoProgramError as error:
            return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason=str(error))
        return layout, program

    async def _judged(self, layout: Layout, program: str, runner: SharedRunner) -> Verdict:
        limits = Limits(seconds=layout.time_limit or self.case_time, memory_mb=layout.memory_mb or self.memory_mb)
        text = assembled(program, layout.prelude, layout.stub, layout.context, layout.entry_point)
        trial = Trial(runner, text, layout.language, limits, self.total_time, layout.packages)
        results = await tried(layout.cases, trial, self.credit)
        return replace(scored(layout.cases, results, self.credit, program), seconds=trial.seconds)

    async def _solution_problem(self, task: Task, layout: Layout, runner: SharedRunner) -> str | None:
        """Return what is wrong with the task's own solution, or None; found once for a task."""
        solution = layout.solution or task.demonstration or (task.answer if isinstance(task.answer, str) else None)
        if solution is None:
            return "it brings no solution to validate: give info['solution'], or set validate=false"
        try:
            program = find_program(
                solution, layout.language, self.block, max_length=self.max_length, wanted=layout.entry_point
            )
        except NoProgramError as error:
            return f"its solution: {error}"
        if layout.digest not in self._solutions:
            verdict = await self._judged(layout, program, runner)
            if verdict.score is None:
                return f"its solution could not be run: {verdict.reason}"
            if verdict.score < 1:
                failure = f"its own solution does not pass: {verdict.reason}"
            else:
                failure = None
            self._solutions[layout.digest] = failure
        return self._solutions[layout.digest]
