"""The code verifier: runs the program of a completion in a sandbox on the task's test cases and judges the results.

Invariants: this process does not parse, compile or run code that a model wrote; the program never receives an expected
result; a case fails if the program exceeds a limit, and stays undecided if the sandbox fails.
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
from rlvr.verifiers.code.cases import Credit, Trial, scored, tried
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.extraction import NoProgramError, Which, find_program
from rlvr.verifiers.code.layout_fields import LayoutError
from rlvr.verifiers.code.layouts import Layout, read_layout
from rlvr.verifiers.code.programs import assembled
from rlvr.verifiers.code.runner import Limits
from rlvr.verifiers.code.shared import SandboxRequest, SharedRunner, missing_here, shared_runner
from rlvr.verifiers.code.steady import is_steady

# Arbitrary, above the tasks of a step. A task of EvalPlus may have megabytes: the cache does not hold a whole data set.
MAX_LAYOUTS = 1024
"""Size of the cache of parsed tasks, which drops the least recently used."""


@register_verifier("code")
@dataclass
class CodeVerifier(Verifier):
    """Runs the program of a completion on the test cases of the task; scores 1 if all pass, or as `credit` says.

    `task.info` holds the cases (docs/code.md). Its `kind` is `stdio`, such as
    `{"kind": "stdio", "cases": [{"input": ..., "output": ...}]}`, `function`, `asserts`, `humaneval`, `checker` or
    `property`. The program is the last fenced block, or the whole text if there is none. Each case runs in a new
    process in a sandbox; what the program prints or returns is compared outside of that process.
    """

    language: Literal["python", "c", "cpp", "javascript"] = "python"
    """The language of programs whose task names none."""
    block: Which = "last"
    """The block that is taken as the program if several fenced blocks may be it: the `last`, the `first`, or none
    (`only`: several are unparsable)."""
    credit: Credit = "all"
    """The score: 1 if every case passes, else 0 (`all`); the `share` of cases that pass; or the share that passes up to
    the `first_failure`. Shares count the weights of cases."""
    case_time: float = 2.0
    """Seconds of wall clock for one case, unless the task sets a limit."""
    memory_mb: int = 256
    """Memory of the program in one case, unless the task sets a limit."""
    total_time: float = 30.0
    """Seconds that all cases of one answer may take together, checkers included; cases not run by then count as
    failed."""
    comparison: dict[str, Any] = field(default_factory=dict)
    """Options of the comparison of outputs and values, unless the task gives its own: `tolerance` (1e-6), `lines`,
    `ignore_case`, `strict_sequences`, `strict_numbers`."""
    max_length: int = 100_000
    """Largest number of characters of a program; a longer one is unparsable."""
    think_opened_by_prompt: bool = False
    """Set this if the chat template ends the prompt with `<think>`: a completion without `</think>` then has no
    program."""
    validate: bool = False
    """Run the solution of each task (`info["solution"]`, else its demonstration, else its answer if that is a text),
    and refuse a task whose solution does not score 1."""
    tier: str = "auto"
    """The isolation of the sandbox: the strongest tier that works here (`auto`), a tier by name, or the http address of
    a SandboxFusion service."""
    unsafe: bool = False
    """Accept a sandbox tier with less isolation than `full`."""
    workers: int | None = None
    """Programs that run at the same time; null: one for each core."""
    time_limit: float = 3600.0
    """Seconds for one answer, including the wait for a free sandbox; an answer that takes longer is undecided."""

    needs: ClassVar[Needs] = Needs(remote=True)

    def __post_init__(self) -> None:
        for name in ("case_time", "memory_mb", "total_time", "max_length", "time_limit"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"code: {name}={getattr(self, name)} must be above 0")
        try:
            self._comparison = Comparison.read(self.comparison, Comparison())
        except ValueError as error:
            raise ConfigError(f"code: {error}") from None
        self._sandbox = SandboxRequest(self.tier, self.unsafe, self.workers)
        self._layouts: OrderedDict[int, tuple[Task, Layout]] = OrderedDict()
        # Two locks: `_cache_lock` guards the cache and is held briefly; `_parse_lock` is held while a task is parsed,
        # up to a second. `quick` runs on the event loop of the rollouts and must not wait for `_parse_lock`.
        self._cache_lock = threading.Lock()
        self._parse_lock = threading.Lock()
        self._solution_problems: dict[str, str | None] = {}
        """Digest of a layout -> what is wrong with its solution, None if nothing."""

    def prepare(self) -> None:
        """Open the sandbox. ConfigError if the requested one cannot be opened."""
        self._runner()

    def quick(self, task: Task, completion: str) -> Verdict | None:
        """The verdict of a completion that has no program; None if it has one, or if the task is not parsed yet."""
        if self._cached_layout(task) is None:
            return None
        parsed = self._parse(task, completion)
        return parsed if isinstance(parsed, Verdict) else None

    def cache_key(self, task: Task, completion: str) -> Hashable | None:
        """The task and the program, if the program is known to be deterministic; else None. None too if the task is not
        parsed yet."""
        if self._cached_layout(task) is None:
            return None
        parsed = self._parse(task, completion)
        if isinstance(parsed, Verdict):
            return None
        layout, program = parsed
        # `is_steady` knows only Python and its standard library; a package may be random.
        plain = layout.language == "python" and not layout.packages
        steady = plain and is_steady(program, (layout.prelude, layout.stub, layout.context))
        return (layout.digest, program) if steady else None

    async def verify(self, task: Task, completion: str) -> Verdict:
        """The verdict on a completion. Many calls may wait at once; the sandbox runs `workers` programs at a time."""
        if self._cached_layout(task) is not None:
            parsed = self._parse(task, completion)
        else:
            parsed = await asyncio.to_thread(self._parse, task, completion)
        if isinstance(parsed, Verdict):
            return parsed
        layout, program = parsed
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
        """The requirement of the task that this sandbox does not meet, None if it meets all. A remote service is not
        checked."""
        is_local = not self.tier.startswith("http")
        return (layout.lacks if is_local else "") or missing_here(layout.language, layout.packages, self._sandbox)

    def _runner(self) -> SharedRunner:
        return shared_runner(self._sandbox)

    def _cached_layout(self, task: Task) -> Layout | None:
        """The parsed task, if the cache has it."""
        with self._cache_lock:
            entry = self._layouts.get(id(task))
            if entry is None:
                return None
            self._layouts.move_to_end(id(task))
            return entry[1]

    def _layout(self, task: Task) -> Layout:
        """The parsed task, from the cache or parsed now. LayoutError if `task.info` is wrong."""
        if (cached := self._cached_layout(task)) is not None:
            return cached
        # Checked again under the lock: another completion of the same group may have parsed the task meanwhile.
        with self._parse_lock:
            if (cached := self._cached_layout(task)) is not None:
                return cached
            layout = read_layout(task.info, self.language, self._comparison, task.prompt)
            with self._cache_lock:
                # The entry holds the task, so that no other object gets the same id while the entry exists.
                self._layouts[id(task)] = task, layout
                if len(self._layouts) > MAX_LAYOUTS:
                    self._layouts.popitem(last=False)
        return layout

    def _parse(self, task: Task, completion: str) -> tuple[Layout, str] | Verdict:
        """The parsed task and the completion's program; a verdict if the task is wrong or there is no program."""
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
        """Run the program on the task's cases and score the results."""
        limits = Limits(seconds=layout.time_limit or self.case_time, memory_mb=layout.memory_mb or self.memory_mb)
        text = assembled(program, layout.prelude, layout.stub, layout.context, layout.entry_point)
        trial = Trial(runner, text, layout.language, limits, self.total_time, layout.packages)
        results = await tried(layout.cases, trial, self.credit)
        return replace(scored(layout.cases, results, self.credit, program), seconds=trial.seconds)

    async def _solution_problem(self, task: Task, layout: Layout, runner: SharedRunner) -> str | None:
        """The reason why the task's solution does not pass, None if it passes. The solution is run once for each
        layout, and again only if the sandbox failed."""
        solution = layout.solution or task.demonstration or (task.answer if isinstance(task.answer, str) else None)
        if solution is None:
            return "it brings no solution to validate: give info['solution'], or set validate=false"
        try:
            program = find_program(
                solution, layout.language, self.block, max_length=self.max_length, wanted=layout.entry_point
            )
        except NoProgramError as error:
            return f"its solution: {error}"
        if layout.digest not in self._solution_problems:
            verdict = await self._judged(layout, program, runner)
            if verdict.score is None:
                return f"its solution could not be run: {verdict.reason}"
            if verdict.score < 1:
                problem = f"its own solution does not pass: {verdict.reason}"
            else:
                problem = None
            self._solution_problems[layout.digest] = problem
        return self._solution_problems[layout.digest]
