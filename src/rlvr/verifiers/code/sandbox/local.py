"""The runner that executes jobs in sandboxes on this machine, by default with one zygote for each usable CPU core.

A zygote is a process inside the sandbox that forks one child for each program.

Invariants:
- A job's source, input and arguments travel over sockets of that job only, never through the zygote.
- A job whose sandbox failed (`SandboxError`) is run once more. If the second run fails too, the outcome is
  `Ended.CRASHED` when the program had started in that run: otherwise a program could end its own sandbox and so leave
  its verdict undecided. When the program had not started, the outcome is `Ended.BROKEN`.
- Everything that a program reports about itself is an untrusted claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from rlvr.errors import ConfigError
from rlvr.verifiers.code.apart import IN_PLACE, OF_PROGRAM
from rlvr.verifiers.code.runner import Ended, Job, Outcome
from rlvr.verifiers.code.sandbox.execution import Execution, Program
from rlvr.verifiers.code.sandbox.inside.objects import AWAITED, HELD
from rlvr.verifiers.code.sandbox.inside.program import CHANGED, RAISED, SIZE_BYTES, VALUE
from rlvr.verifiers.code.sandbox.languages import COMPILING, NATIVE, PROGRAM, check_language, languages
from rlvr.verifiers.code.sandbox.tiers import Tier
from rlvr.verifiers.code.sandbox.zygote_process import SandboxError, Zygote

# Arbitrary, more than the programs that are judged at once. Each takes at most `LARGEST_PROGRAM` bytes.
_CACHED_PROGRAMS = 64
"""Number of compiled programs in the cache."""
_LIMIT_STEP = 2**24
"""Memory for input and output is rounded up to a multiple of this many bytes, so that a slightly longer input rarely
raises the cgroup's limit, which takes a write."""


class LocalRunner:
    """Runs jobs in one isolation tier. Several tasks of one event loop may use it concurrently."""

    def __init__(self, tier: Tier, workers: int | None = None) -> None:
        self.tier = tier.name
        self._tier = tier
        self._slots = workers or len(os.sched_getaffinity(0))
        self._free: asyncio.Queue[Zygote | None] | None = None
        self._zygotes: set[Zygote] = set()
        self._starting: set[asyncio.Task[Zygote]] = set()
        self._closed = False
        self._package_runners: dict[tuple[str, ...], LocalRunner] = {}
        """For each set of importable packages, a runner of the same tier with its own zygotes."""
        self._compiled: OrderedDict[tuple[str, bytes], asyncio.Task[Outcome]] = OrderedDict()

    async def run(self, job: Job) -> Outcome:
        """See Runner. ConfigError for a language that is not installed, or for a call in a language other than
        Python."""
        check_language(job)
        if job.packages:
            return await self._runner_with(job.packages).run(replace(job, packages=()))
        source = _bytes(job.source)
        if job.language == "python":
            if job.call is None:
                return await self._run_program(
                    Program({"kind": "script", "sealed": job.sealed}, source, job.limits, job.stdin)
                )
            order = {"kind": "serve", "once": True, "name": job.call.name, "sealed": job.sealed}
            order["argument"] = job.call.argument
            return await self._run_program(Program(order, source, job.limits, job.stdin, job.call.message()))
        language = NATIVE[job.language]
        tool = languages()[job.language]
        if not language.compiled:
            # By default V8 sizes its heap by the machine's memory. With this option it exits at the limit, before the
            # kernel kills it.
            argv = [tool, f"--max-old-space-size={job.limits.memory_mb}", language.source]
            order = {"kind": "execute", "file": language.source, "argv": argv}
            return await self._run_program(Program(order, source, job.limits, job.stdin, address_space=False))
        compiled = await self._compile(job.language, source)
        if compiled.ended is not Ended.DONE:
            return compiled
        size = int.from_bytes(compiled.claim[:SIZE_BYTES], "big")
        order = {"kind": "execute", "file": PROGRAM, "argv": [f"./{PROGRAM}"], "packed": True}
        # The executable is written to the same folder, so its size (in MiB, rounded up) is added to the file limit.
        limits = replace(job.limits, file_mb=job.limits.file_mb + -(-size // 2**20))
        return await self._run_program(Program(order, compiled.claim[SIZE_BYTES:], limits, job.stdin))

    async def test(self, job: Job, candidate: Job, name: str, token: str) -> Outcome:
        """See Runner. The candidate's process lives until the test ends and has the test's wall-clock limit."""
        if {job.language, candidate.language} != {"python"}:
            raise ConfigError("a test with a candidate needs both programs in python")
        if job.packages:
            return await self._runner_with(job.packages).test(replace(job, packages=()), candidate, name, token)
        # The candidate waits while the test computes, so its own wall-clock limit could end it too early.
        limits = replace(candidate.limits, seconds=job.limits.seconds)
        called = candidate.call.name if candidate.call is not None else name
        order = {"kind": "serve", "once": False, "name": called, "sealed": False, "argument": None}
        served = Program(order, _bytes(candidate.source), limits)
        helper_names = {"in_place": IN_PLACE, "of_program": OF_PROGRAM}
        order = {"kind": "test", "name": name, "called": called, "token": token, **helper_names}
        test = Program(order, _bytes(job.source), job.limits, job.stdin)
        return await self._with_retry(lambda zygote: _attempt_test(zygote, test, served))

    async def close(self) -> None:
        """End every process of this runner and of its runners with packages; jobs that still run are undecided."""
        for task in self._compiled.values():
            task.cancel()
        self._compiled.clear()
        self._closed = True
        for runner in self._package_runners.values():
            await runner.close()
        # A start that is cancelled ends its own process.
        starting = list(self._starting)
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for zygote in list(self._zygotes):
            await zygote.close()

    def _runner_with(self, packages: tuple[str, ...]) -> LocalRunner:
        if packages not in self._package_runners:
            self._package_runners[packages] = LocalRunner(replace(self._tier, packages=packages), self._slots)
        return self._package_runners[packages]

    @contextlib.asynccontextmanager
    async def _zygote(self) -> AsyncIterator[Zygote]:
        """Reserve a zygote for the caller until the context ends. SandboxError when none can be started."""
        if self._free is None:
            # None is a slot whose zygote is not started. Last in, first out: under light load the started zygotes are
            # reused, and the others are never started.
            self._free = asyncio.LifoQueue()
            for _ in range(self._slots):
                self._free.put_nowait(None)
        free = self._free
        zygote = await free.get()
        try:
            if zygote is not None and not zygote.alive:
                await self._end(zygote)
                zygote = None
            if zygote is None:
                zygote = await self._start()
            yield zygote
        finally:
            kept = zygote if zygote is not None and self._tier.lasting and zygote.alive else None
            # Shielded: otherwise the cancellation of the caller would also cancel the closing, and the zygote's
            # processes would stay.
            if zygote is not kept and zygote is not None:
                await asyncio.shield(self._end(zygote))
            free.put_nowait(kept)

    async def _start(self) -> Zygote:
        """A new zygote. SandboxError when it does not start, or the runner is closed before it has."""
        if self._closed:
            raise SandboxError("the sandbox was closed")
        start = asyncio.ensure_future(Zygote.start(self._tier))
        self._starting.add(start)
        try:
            zygote = await start
        except asyncio.CancelledError:
            # It was ready in the same turn of the loop.
            if start.done() and not start.cancelled() and start.exception() is None:
                await asyncio.shield(self._end(start.result()))
            # Two cases look the same here: `close` has cancelled the start, or the caller is cancelled.
            caller = asyncio.current_task()
            if self._closed and not (caller and caller.cancelling()):
                raise SandboxError("the sandbox was closed") from None
            raise
        finally:
            self._starting.discard(start)
        self._zygotes.add(zygote)
        return zygote

    async def _end(self, zygote: Zygote) -> None:
        self._zygotes.discard(zygote)
        await zygote.close()

    async def _run_program(self, program: Program) -> Outcome:
        return await self._with_retry(lambda zygote: _attempt_program(zygote, program))

    async def _with_retry(self, attempt: Callable[[Zygote], Awaitable[Outcome]]) -> Outcome:
        """Return the outcome of `attempt` on a zygote; on SandboxError try once more."""
        failure = SandboxError("the sandbox did not run")
        # The host may cause one failure (no memory, a killed zygote). If the program had started when the second
        # attempt failed, the program is held responsible.
        for _ in range(2):
            try:
                async with self._zygote() as zygote:
                    return await attempt(zygote)
            except SandboxError as error:
                failure = error
        return Outcome(Ended.CRASHED if failure.started else Ended.BROKEN, reason=str(failure))

    async def _compile(self, language: str, source: bytes) -> Outcome:
        """Return an outcome whose claim is the compiled program. Jobs with the same source share one compilation."""
        key = language, source
        task = self._compiled.get(key)
        # A failure of the sandbox (BROKEN, or an exception of its own) is tried again. Every other outcome is cached,
        # also a compiler error or a time limit.
        if task is None or _failed(task):
            task = self._compiled[key] = asyncio.ensure_future(self._compiling(language, source))
        self._compiled.move_to_end(key)
        while len(self._compiled) > _CACHED_PROGRAMS:
            self._compiled.popitem(last=False)
        # Shielded: other callers may wait for the same task, so the cancellation of one must not cancel it.
        return await asyncio.shield(task)

    async def _compiling(self, language: str, source: bytes) -> Outcome:
        native = NATIVE[language]
        argv = [languages()[language], *native.options, native.source, *native.after]
        order = {"kind": "compile", "file": native.source, "argv": argv, "made": PROGRAM}
        outcome = await self._run_program(Program(order, source, COMPILING))
        if outcome.ended is Ended.DONE:
            if _is_packed_program(outcome.claim):
                return outcome
            return replace(outcome, ended=Ended.RAISED, claim=b"", reason="the compiler made no program")
        errors = outcome.stderr.decode(errors="replace").splitlines()
        # The first line with an error; the lines before it name the files that include the faulty one.
        first = next((line for line in errors if "error" in line), outcome.reason)
        return replace(outcome, reason=f"it does not compile: {first}")


def _raise_limits(zygote: Zygote, *programs: Program) -> None:
    """Raise the limits of the zygote's cgroup to what these programs may use together."""
    # `file_mb` counts as memory, since the files are in a tmpfs.
    memory = sum((one.limits.memory_mb + one.limits.file_mb) * 2**20 for one in programs)
    transferred = sum(2 * one.limits.output_bytes + len(one.stdin) + len(one.source) for one in programs)
    # Input and output are held in several buffers at once (socket, pipe, the supervisor's memory), here taken as 4.
    buffers = -(-4 * transferred // _LIMIT_STEP) * _LIMIT_STEP
    zygote.leaf.limit(memory + buffers, sum(one.limits.processes for one in programs))


async def _attempt_program(zygote: Zygote, program: Program) -> Outcome:
    _raise_limits(zygote, program)
    with Execution(zygote, program) as execution:
        # Sending and waiting run concurrently: a program that ends without reading its input would block the sender.
        sending = asyncio.ensure_future(execution.tell())
        try:
            return await execution.outcome()
        finally:
            sending.cancel()


class _CandidateEndedError(Exception):
    """The candidate's process ended while the test was waiting for it."""


async def _attempt_test(zygote: Zygote, test: Program, served: Program) -> Outcome:
    """Run a test and its candidate, each in its own process, and pass the messages between them."""
    _raise_limits(zygote, test, served)
    with Execution(zygote, served) as candidate, Execution(zygote, test) as tester:

        async def answer(body: bytes) -> bytes:
            # The report is forwarded without decoding it, since it may be large; the test's process decodes it.
            try:
                report = await candidate.ask(body)
            except (OSError, EOFError) as error:
                raise _CandidateEndedError from error
            if report[:1] not in (VALUE, RAISED, CHANGED, HELD, AWAITED):
                raise _CandidateEndedError
            return report

        try:
            if not await candidate.load():
                return _candidate_failure(await candidate.outcome())
            await tester.tell()
            return await tester.outcome(answer)
        except _CandidateEndedError:
            return _candidate_failure(await candidate.outcome())
        except SandboxError as error:
            # `started` is the candidate's: the test is the task's code, and the candidate is the program to blame.
            raise SandboxError(str(error), started=candidate.started) from error


def _candidate_failure(outcome: Outcome) -> Outcome:
    """The outcome of a candidate that ended before its test did."""
    if outcome.ended is Ended.DONE:
        return replace(outcome, ended=Ended.RAISED, value=None, reason="the candidate ended during the test")
    return replace(outcome, reason=f"the candidate: {outcome.reason}")


def _failed(task: asyncio.Task[Outcome]) -> bool:
    """Return True if the task is over without an outcome of the program."""
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().ended is Ended.BROKEN


def _is_packed_program(claim: bytes) -> bool:
    """Return True if `claim` has the form that a compiler's process reports: the size of the executable, then the
    executable compressed by zlib. The size must be within the file limit of a compilation."""
    size = int.from_bytes(claim[:SIZE_BYTES], "big")
    return len(claim) > SIZE_BYTES and size <= COMPILING.file_mb * 2**20


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
