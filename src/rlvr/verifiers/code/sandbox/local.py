"""The runner on this machine: zygotes, as many as there are cores, and what their jobs claim.

Invariants: a job's source, input and arguments travel only over sockets of its own, never through the zygote; a job
whose zygote died is run once more on another. When that fails too, the run is `Ended.BROKEN` if the program had not
started, else `Ended.CRASHED`: a sandbox that ends twice while the same program runs was ended by it, and no program may
choose to be undecided. Whatever a program says is a claim.
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

# Arbitrary, above the programs that are judged at a time; each is at most `LARGEST_PROGRAM` bytes (4 MiB).
_COMPILED = 64
"""Compiled programs that are kept."""
_STEP = 2**24
"""Bytes to which a cgroup's limit is rounded, so that inputs of various lengths do not each need a write."""


class LocalRunner:
    """Runs jobs in a tier of isolation. Safe to use from several tasks of one event loop at a time."""

    def __init__(self, tier: Tier, workers: int | None = None) -> None:
        self.tier = tier.name
        self._tier = tier
        self._slots = workers or len(os.sched_getaffinity(0))
        self._free: asyncio.Queue[Zygote | None] | None = None
        self._zygotes: set[Zygote] = set()
        self._closed = False
        self._with: dict[tuple[str, ...], LocalRunner] = {}
        """Runners of the same tier with packages, each with zygotes of its own."""
        self._compiled: OrderedDict[tuple[str, bytes], asyncio.Task[Outcome]] = OrderedDict()

    async def run(self, job: Job) -> Outcome:
        """See Runner. ConfigError for a language that is not here, or a call in another than Python."""
        check_language(job)
        if job.packages:
            return await self._having(job.packages).run(replace(job, packages=()))
        source = _bytes(job.source)
        if job.language == "python":
            if job.call is None:
                return await self._twice(
                    Program({"kind": "script", "sealed": job.sealed}, source, job.limits, job.stdin)
                )
            order = {"kind": "serve", "once": True, "name": job.call.name, "sealed": job.sealed}
            order["argument"] = job.call.argument
            return await self._twice(Program(order, source, job.limits, job.stdin, job.call.message()))
        language = NATIVE[job.language]
        tool = languages()[job.language]
        if not language.compiled:
            # V8 sizes its heap by the machine's memory unless it is told; past the limit it ends itself instead of
            # being killed.
            argv = [tool, f"--max-old-space-size={job.limits.memory_mb}", language.source]
            order = {"kind": "execute", "file": language.source, "argv": argv}
            return await self._twice(Program(order, source, job.limits, job.stdin, address_space=False))
        compiled = await self._compile(job.language, source)
        if compiled.ended is not Ended.DONE:
            return compiled
        size = int.from_bytes(compiled.claim[:SIZE_BYTES], "big")
        order = {"kind": "execute", "file": PROGRAM, "argv": [f"./{PROGRAM}"], "packed": True}
        # The program itself is a file, too.
        limits = replace(job.limits, file_mb=job.limits.file_mb + -(-size // 2**20))
        return await self._twice(Program(order, compiled.claim[SIZE_BYTES:], limits, job.stdin))

    async def test(self, job: Job, candidate: Job, name: str, token: str) -> Outcome:
        """See Runner. The candidate's process lives as long as the test does, under the test's wall clock."""
        if {job.language, candidate.language} != {"python"}:
            raise ConfigError("a test with a candidate is for programs in python")
        if job.packages:
            return await self._having(job.packages).test(replace(job, packages=()), candidate, name, token)
        # The candidate waits for the test, so its own clock would end it while the test computes.
        limits = replace(candidate.limits, seconds=job.limits.seconds)
        called = candidate.call.name if candidate.call is not None else name
        order = {"kind": "serve", "once": False, "name": called, "sealed": False, "argument": None}
        served = Program(order, _bytes(candidate.source), limits)
        own = {"in_place": IN_PLACE, "of_program": OF_PROGRAM}
        order = {"kind": "test", "name": name, "called": called, "token": token, **own}
        test = Program(order, _bytes(job.source), job.limits, job.stdin)
        return await self._again(lambda zygote: _pair(zygote, test, served))

    async def close(self) -> None:
        """End every process; jobs that still run are undecided."""
        for task in self._compiled.values():
            task.cancel()
        self._compiled.clear()
        self._closed = True
        for runner in self._with.values():
            await runner.close()
        for zygote in list(self._zygotes):
            await zygote.close()

    def _having(self, packages: tuple[str, ...]) -> LocalRunner:
        if packages not in self._with:
            self._with[packages] = LocalRunner(replace(self._tier, packages=packages), self._slots)
        return self._with[packages]

    @contextlib.asynccontextmanager
    async def _zygote(self) -> AsyncIterator[Zygote]:
        """A zygote of one's own for a while. SandboxError when none can be started."""
        # Made on first use, since a queue belongs to the loop on which it is waited for.
        if self._free is None:
            # Last in, first out: under light load the same zygotes serve, and the others are never started (None stands
            # for one that is not).
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
                if self._closed:
                    raise SandboxError("the sandbox was closed")
                zygote = await Zygote.start(self._tier)
                self._zygotes.add(zygote)
            yield zygote
        finally:
            kept = zygote if zygote is not None and self._tier.lasting and zygote.alive else None
            # Shielded: a cancelled caller would otherwise leave the processes of its zygote behind. The slot goes back
            # in every case.
            if zygote is not kept and zygote is not None:
                await asyncio.shield(self._end(zygote))
            free.put_nowait(kept)

    async def _end(self, zygote: Zygote) -> None:
        self._zygotes.discard(zygote)
        await zygote.close()

    async def _twice(self, program: Program) -> Outcome:
        return await self._again(lambda zygote: _once(zygote, program))

    async def _again(self, attempt: Callable[[Zygote], Awaitable[Outcome]]) -> Outcome:
        """The outcome of an attempt on a zygote, of a second one where the first failed."""
        failure = SandboxError("the sandbox did not run")
        # Twice: one failure may be the host's (memory, a killed zygote). A second one while the program ran is the
        # program's doing.
        for _ in range(2):
            try:
                async with self._zygote() as zygote:
                    return await attempt(zygote)
            except SandboxError as error:
                failure = error
        return Outcome(Ended.CRASHED if failure.started else Ended.BROKEN, reason=str(failure))

    async def _compile(self, language: str, source: bytes) -> Outcome:
        """The compiled program as the outcome's claim; one that another task compiles already is waited for."""
        key = language, source
        task = self._compiled.get(key)
        # A compilation that the sandbox failed is tried anew; one that the compiler refused stays refused.
        if task is None or task.cancelled() or (task.done() and task.result().ended is Ended.BROKEN):
            task = self._compiled[key] = asyncio.ensure_future(self._compiling(language, source))
        self._compiled.move_to_end(key)
        while len(self._compiled) > _COMPILED:
            self._compiled.popitem(last=False)
        # Others wait for the same task, so the cancellation of one caller must not end it.
        return await asyncio.shield(task)

    async def _compiling(self, language: str, source: bytes) -> Outcome:
        how = NATIVE[language]
        argv = [languages()[language], *how.options, how.source, *how.after]
        order = {"kind": "compile", "file": how.source, "argv": argv, "made": PROGRAM}
        outcome = await self._twice(Program(order, source, COMPILING))
        if outcome.ended is Ended.DONE:
            if _is_program(outcome.claim):
                return outcome
            return replace(outcome, ended=Ended.RAISED, claim=b"", reason="the compiler made no program")
        errors = outcome.stderr.decode(errors="replace").splitlines()
        # The first line that names an error; before it stand notes of the files that include it.
        first = next((line for line in errors if "error" in line), outcome.reason)
        return replace(outcome, reason=f"it does not compile: {first}")


def _allow(zygote: Zygote, *programs: Program) -> None:
    """Have the zygote's cgroup leaf allow what these programs may use together."""
    # `file_mb` counts as memory, since the files are in a tmpfs.
    memory = sum((one.limits.memory_mb + one.limits.file_mb) * 2**20 for one in programs)
    texts = sum(2 * one.limits.output_bytes + len(one.stdin) + len(one.source) for one in programs)
    # What is read and written is in several buffers at once: the trainer's side of a socket, a pipe, the supervisor's
    # memory.
    zygote.leaf.limit(memory + -(-4 * texts // _STEP) * _STEP, sum(one.limits.processes for one in programs))


async def _once(zygote: Zygote, program: Program) -> Outcome:
    _allow(zygote, program)
    with Execution(zygote, program) as execution:
        # Sending and waiting go on side by side: a program that ends without reading its input would block the sender.
        sending = asyncio.ensure_future(execution.tell())
        try:
            return await execution.outcome()
        finally:
            sending.cancel()


class _CandidateEndedError(Exception):
    """The candidate's process ended while the test was waiting for it."""


async def _pair(zygote: Zygote, test: Program, served: Program) -> Outcome:
    """A test and its candidate, each in a process of its own, all that they say to each other passing through here."""
    _allow(zygote, test, served)
    with Execution(zygote, served) as candidate, Execution(zygote, test) as tester:

        async def answer(body: bytes) -> bytes:
            # Only passed on: a call and its answer may be large, and the test's process decodes what the candidate
            # says.
            try:
                report = await candidate.ask(body)
            except (OSError, EOFError) as error:
                raise _CandidateEndedError from error
            if report[:1] not in (VALUE, RAISED, CHANGED, HELD, AWAITED):
                raise _CandidateEndedError
            return report

        try:
            if not await candidate.load():
                return _failed(await candidate.outcome())
            await tester.tell()
            return await tester.outcome(answer)
        except _CandidateEndedError:
            return _failed(await candidate.outcome())
        except SandboxError as error:
            raise SandboxError(str(error), started=candidate.started) from error


def _failed(outcome: Outcome) -> Outcome:
    """The outcome of a candidate that ended before its test did."""
    if outcome.ended is Ended.DONE:
        return replace(outcome, ended=Ended.RAISED, value=None, reason="the candidate ended during the test")
    return replace(outcome, reason=f"the candidate: {outcome.reason}")


def _is_program(claim: bytes) -> bool:
    """Return whether a compiler's claim is the size of a program and the program, packed."""
    size = int.from_bytes(claim[:SIZE_BYTES], "big")
    return len(claim) > SIZE_BYTES and size <= COMPILING.file_mb * 2**20


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
