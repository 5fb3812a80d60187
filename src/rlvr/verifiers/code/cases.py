"""One case of a task: run the program on it in the sandbox, and judge outside what it claims; and from the results of
cases to one score.

Cases run in their order, in growing groups: one, two, four, eight. So a program that fails at once costs one execution,
and one that passes uses all cores.

Invariants: what is expected is in no job that a program takes part in; a case ends in a Result, never in an exception
for what the program did; only a sandbox that failed leaves it undecided; the score does not depend on how
many cases ran beyond what decides it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlvr.records import Verdict, VerdictStatus
from rlvr.verifiers.code import judge
from rlvr.verifiers.code.asserts import Expression, holds
from rlvr.verifiers.code.compare import Comparison, difference, same_text, short
from rlvr.verifiers.code.programs import callable_name
from rlvr.verifiers.code.runner import DECODED_SIZE, Call, Ended, Job, Limits, Outcome, Runner
from rlvr.verifiers.code.values import encode

# Arbitrary: a checker is the task author's and may compute more than a program; its time counts towards `total_time`.
CHECKER_LIMITS = Limits(seconds=10.0, memory_mb=512)
"""Limits of one run of a task's own checker."""


@dataclass(frozen=True)
class Result:
    """The result of a case: `passed` in [0, 1], None where it is undecided."""

    passed: float | None
    reason: str = ""
    ended: Ended = Ended.DONE

    @property
    def is_failure(self) -> bool:
        """Return True if the case is decided and did not pass in full."""
        return self.passed is not None and self.passed < 1


@dataclass
class Trial:
    """A program and where it is run."""

    runner: Runner
    program: str
    language: str
    limits: Limits
    total_time: float = math.inf
    packages: tuple[str, ...] = ()
    seconds: float = 0.0
    """Wall clock that the program's executions, and those that judge it, took so far."""

    @property
    def seconds_left(self) -> float:
        """Return the seconds that are left of `total_time`."""
        return self.total_time - self.seconds

    async def run(self, call: Call | None = None, stdin: str = "", room: int = 0) -> Outcome:
        """One execution; `room`: bytes of output that are expected, of which twice as many may be written."""
        # Twice what is expected, so that a wrong answer of about the right length is compared and not cut off.
        limits = replace(self.limits, output_bytes=max(self.limits.output_bytes, 2 * room))
        if call is not None:
            call = replace(call, name=callable_name(self.program, call.name))
        return await self.other(Job(self.program, self.language, stdin.encode(), call, limits, self.packages))

    async def other(self, job: Job) -> Outcome:
        """One execution of anything that is needed to judge the program, counted as the program's own are."""
        return self._counted(await self.runner.run(job))

    async def judged(self, job: Job) -> Result:
        """The result that a judge gives who needs no call."""
        outcome = await self.other(job)
        if outcome.ended is Ended.BROKEN:
            return failed(outcome)
        answer = judge.answer(outcome)
        if answer is None:
            return Result(1.0)
        return Result(0.0, str(answer))

    async def test(self, source: str, name: str) -> Result:
        """Test code, with `name` as a proxy of the program's function, in a process apart from the program."""
        # The test's process reports it at its end. A candidate cannot: it is in another process and never sees it.
        token = secrets.token_hex(16)
        called = Call(callable_name(self.program, name))
        test = Job(source, limits=self.limits, packages=self.packages)
        candidate = Job(self.program, call=called, limits=self.limits, packages=self.packages)
        outcome = self._counted(await self.runner.test(test, candidate, name, token))
        if outcome.ended is not Ended.DONE:
            return failed(outcome)
        if outcome.value != token:
            return Result(0.0, "the test did not run to its end")
        return Result(1.0)

    def _counted(self, outcome: Outcome) -> Outcome:
        self.seconds += outcome.seconds
        return outcome


def decided(problem: str | None) -> Result:
    """The result of a case that was judged: `problem` is why it fails, None where it passes."""
    return Result(1.0) if problem is None else Result(0.0, problem)


def failed(outcome: Outcome) -> Result:
    """The result of a case whose execution did not end well."""
    if outcome.ended is Ended.BROKEN:
        return Result(None, f"the sandbox failed: {outcome.reason}", outcome.ended)
    return Result(0.0, outcome.reason or outcome.ended.value, outcome.ended)


@dataclass(frozen=True)
class Case(ABC):
    """A case: its place in the task, and what it weighs beside the others."""

    place: str
    weight: float

    @abstractmethod
    async def judge(self, trial: Trial) -> Result:
        """The result of the program on this case."""


@dataclass(frozen=True)
class StdioCase(Case):
    """A case by the program's output for an input."""

    input: str
    expected: str
    how: Comparison

    async def judge(self, trial: Trial) -> Result:
        outcome = await trial.run(stdin=self.input, room=len(self.expected.encode()))
        if outcome.ended is not Ended.DONE:
            return failed(outcome)
        expected = self.expected.encode()
        # As most right answers are; costs next to nothing, however large.
        if outcome.stdout.rstrip() == expected.rstrip():
            return Result(1.0)
        # Larger texts go to a judge in a sandbox, so that this loop does not stand still.
        if len(outcome.stdout) + len(expected) > DECODED_SIZE:
            return await trial.judged(judge.text_job(outcome.stdout, expected, self.how))
        # What is no UTF-8 cannot equal the expected text, and must not raise.
        printed = outcome.stdout.decode(errors="replace")
        return decided(same_text(printed, self.expected, self.how))


@dataclass(frozen=True)
class CallCase(Case):
    """A case by the return value of a function."""

    call: Call
    """With its arguments encoded, once for all programs."""
    expected: Any
    expected_text: bytes = field(repr=False)
    """The expected value as typed JSON."""
    how: Comparison

    async def judge(self, trial: Trial) -> Result:
        outcome = await trial.run(self.call)
        if outcome.ended is not Ended.DONE:
            return failed(outcome)
        # `size`, not the length of the claim: a range of a billion members is a short text.
        if outcome.size + len(self.expected_text) > DECODED_SIZE:
            return await trial.judged(judge.value_job(outcome.claim, self.expected_text, self.how))
        return decided(difference(outcome.value, self.expected, self.how))


class _CallFailedError(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class _TooLargeError(Exception):
    """A returned value that is not decoded here."""


@dataclass(frozen=True)
class AssertCase(Case):
    """A condition on what functions return. `name`: the one function, whatever the condition calls it."""

    condition: Expression = field(repr=False)
    text: str
    functions: frozenset[str]
    """The names in `text` that stand for functions of the program."""
    name: str = ""

    async def judge(self, trial: Trial) -> Result:
        claims: list[bytes] = []
        size = 0

        async def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            nonlocal size
            outcome = await trial.run(Call(self._of_the_program(name), tuple(args), kwargs))
            if outcome.ended is not Ended.DONE:
                raise _CallFailedError(outcome)
            claims.append(outcome.claim)
            size += outcome.size
            if size > DECODED_SIZE:
                # The sum over all calls of the test counts: each small value is decoded, but many would add up.
                raise _TooLargeError
            return outcome.value

        try:
            problem = await holds(self.condition, call)
        except _CallFailedError as error:
            return failed(error.outcome)
        except _TooLargeError:
            return await self._in_sandbox(trial, claims)
        return self._result(problem)

    async def _in_sandbox(self, trial: Trial, claims: list[bytes]) -> Result:
        """The same with a judge, which says what call it needs as long as it needs one."""
        # Each round evaluates the test from its start with one more answer, so that the judge holds no state between
        # calls. It ends, since the judge asks for a call only where an answer is missing.
        while True:
            outcome = await trial.other(judge.test_job(self.text, self.functions, claims))
            if outcome.ended is Ended.BROKEN:
                return failed(outcome)
            answer = judge.answer(outcome)
            if not isinstance(answer, judge.NeededCall):
                return self._result(answer)
            called = await trial.run(Call(self._of_the_program(answer.name), encoded=answer.encoded))
            if called.ended is not Ended.DONE:
                return failed(called)
            claims.append(called.claim)

    def _of_the_program(self, called: str) -> str:
        """Return the expression to call: a function, or an expression that begins with the name of one."""
        # `candidate(3)(4)` becomes `add(3)(4)` for a HumanEval task whose function is `add`.
        return re.sub(r"^\w+", lambda own: self.name or own[0], called)

    def _result(self, problem: str | None) -> Result:
        if problem is not None:
            problem = f"{problem}: {short(self.text)}"
        return decided(problem)


@dataclass(frozen=True)
class ProxiedCase(Case):
    """Test code that runs as it is."""

    source: str
    name: str

    async def judge(self, trial: Trial) -> Result:
        return await trial.test(self.source, self.name)


@functools.cache
def _machine_secret() -> bytes:
    """The id of this machine, which no sandbox shows (machine-id(5) calls it confidential); empty where there is none.
    Unlike a random number, it gives a run with the same seed, and each of its processes, the same inputs."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_bytes().strip()
    return b""


@dataclass(frozen=True)
class PropertyCase(Case):
    """A property of a function on an input made at random: of the program's text and a secret, so that no program can
    know it before.

    It holds by a true value. One that returns no value anywhere in its source holds where it raises nothing.
    """

    source: str
    name: str
    number: int
    returns: bool

    async def judge(self, trial: Trial) -> Result:
        # NUL bytes keep the three apart: neither a test nor a program with one compiles, so no text can be shifted from
        # one part to the next.
        text = f"{self.number}\0{self.source}\0{trial.program}".encode("utf-8", "surrogatepass")
        # Keyed by the secret, so that a program that knows the task and itself cannot compute the input; of the
        # program's text, so that it cannot learn the input by trying.
        digest = hmac.digest(_machine_secret(), text, "sha256").hex()
        made = f"holds({self.name}, __import__('random').Random({digest!r}))"
        return await trial.test(f"{self.source}\n{'assert ' if self.returns else ''}{made}\n", self.name)


@dataclass(frozen=True)
class CheckerCase(Case):
    """A task's own checker says whether an output will do.

    It is Python, and runs apart from the program: a function `check(input, output)` or
    `check(input, output, expected)`, which returns a bool or a share in [0, 1], or else a script that reads these as a
    JSON object from its input and ends with code 0.
    """

    checker: str
    parameters: int
    """Of its function; 0 for a script."""
    input: str
    expected: str

    async def judge(self, trial: Trial) -> Result:
        outcome = await trial.run(stdin=self.input, room=len(self.expected.encode()))
        if outcome.ended is not Ended.DONE:
            return failed(outcome)
        output = outcome.stdout.decode(errors="replace")
        # Other answers are judged between these steps.
        await asyncio.sleep(0)  # reading and writing a megabyte take 20 ms each, and the loop turns in between
        fields = {"input": self.input, "output": output, "expected": self.expected}
        # At least 0.1 s, also where the program has used up `total_time`: its output is there, and is still judged.
        limits = replace(CHECKER_LIMITS, seconds=max(0.1, min(CHECKER_LIMITS.seconds, trial.seconds_left)))
        try:
            job = self._job(fields, limits, trial.packages)
        except ValueError as error:
            return Result(0.0, f"the output is not for the checker: {error}")
        await asyncio.sleep(0)
        judgement = await trial.other(job)
        return self._verdict(judgement)

    def _job(self, fields: dict[str, str], limits: Limits, packages: tuple[str, ...]) -> Job:
        """The run of the checker. ValueError for texts that are too large for a call."""
        job = Job(self.checker, limits=limits, packages=packages, sealed=True)
        if not self.parameters:
            return replace(job, stdin=json.dumps(fields).encode())
        encoded = encode([list(fields.values())[: self.parameters], {}])
        return replace(job, call=Call("check", encoded=encoded))

    def _verdict(self, judgement: Outcome) -> Result:
        if judgement.ended is Ended.BROKEN:
            return failed(judgement)
        if judgement.ended is not Ended.DONE:
            return Result(0.0, f"the checker refuses the output: {judgement.reason or judgement.ended.value}")
        # A script gives its verdict by ending with code 0.
        value = judgement.value if self.parameters else True
        # `type` and not `isinstance`, and NaN fails both comparisons.
        if type(value) in (bool, int, float) and 0 <= value <= 1:
            return Result(float(value), "" if value == 1 else f"the checker gives {value}")
        return Result(0.0, f"the checker returned {short(value)}, which is no bool and no share")


Credit = Literal["all", "share", "first_failure"]

# Arbitrary: enough to use the cores of a common machine for one answer, few enough that other answers are not kept
# waiting.
AT_ONCE = 8
"""Cases of one program under way at a time."""

_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")


async def tried(cases: Sequence[Case], trial: Trial, credit: Credit) -> list[Result]:
    """The results of the first cases, as many as decide the score; past the trial's `total_time` the rest counts as
    failed."""
    results: list[Result] = []
    size = 1
    while len(results) < len(cases):
        # Looked at between groups, so up to `AT_ONCE` cases may run past the limit; each has its own.
        if trial.seconds_left < 0:
            late = Result(0.0, f"all cases together took more than {trial.total_time:g} s", Ended.TIME)
            return results + [late] * (len(cases) - len(results))
        group = cases[len(results) : len(results) + size]
        results += await asyncio.gather(*(case.judge(trial) for case in group))
        # The first failure decides `all` and `first_failure`; `share` needs every case.
        if credit != "share" and any(result.is_failure for result in results):
            break
        # 1, 2, 4, 8: a program that fails its first case, as most do early in training, costs one run.
        size = min(2 * size, AT_ONCE)
    return results


def scored(cases: Sequence[Case], results: Sequence[Result], credit: Credit, program: str) -> Verdict:
    """The verdict on a program, of the results of its first cases.

    `all`: 1 where every case passes, else 0. `share`: the weight of what passes over the weight of all.
    `first_failure`: the same of the cases before the first one that fails. A case that the sandbox left undecided
    leaves the whole so, unless the others decide it already.
    """
    total = sum(case.weight for case in cases)
    counted: list[tuple[Case, Result]] = list(zip(cases, results, strict=False))
    bad = next((at for at, result in enumerate(results) if result.is_failure), None)
    # Cases after the first failure do not count, whether they ran or not: how many ran depends on the growing groups.
    if credit == "first_failure" and bad is not None:
        counted = counted[: bad + 1]
    open_cases = [result for _, result in counted if result.passed is None]
    # With `all`, one failed case makes the score 0 whatever the undecided ones would have been.
    if open_cases and not (credit == "all" and bad is not None):
        return Verdict.undecided(open_cases[0].reason, answer=program)
    share = sum(case.weight * (result.passed or 0.0) for case, result in counted) / total
    if bad is None:
        return Verdict.from_score(1.0, answer=program, scores={"passed": 1.0})
    case, result = counted[bad]
    score = 0.0 if credit == "all" else share
    reason = f"{case.place} of {len(cases)}: {result.reason}"[:500]
    return Verdict(_status(score, result), score, reason, program, {"passed": share} if credit == "share" else {})


def _status(score: float, result: Result) -> VerdictStatus:
    if score >= 1:
        return VerdictStatus.CORRECT
    if score > 0:
        return VerdictStatus.PARTIAL
    # The source is compiled in the sandbox only, so that a program which cannot be parsed is known by its exception.
    if result.reason.startswith(_UNREADABLE):
        return VerdictStatus.UNPARSABLE
    return {Ended.TIME: VerdictStatus.TIMEOUT, Ended.MEMORY: VerdictStatus.ERROR}.get(result.ended, VerdictStatus.WRONG)
