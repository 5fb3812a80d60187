"""Worker processes by verifier: a template that loaded it, the workers forked from that, and what becomes of a job.

Invariants: a worker has at most one job; one that was late, broke off or was cancelled in
a job is ended, never used again; at most `most` workers are kept idle.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import cloudpickle

from rlvr.core.component import FILE_MODULE
from rlvr.core.process.deadline import Deadline
from rlvr.records import Verdict, VerdictStatus
from rlvr.verifiers.base import FunctionVerifier, Verifier, display_name
from rlvr.verifiers.pool import worker_process
from rlvr.verifiers.pool.sandbox import readable, sandboxed
from rlvr.verifiers.pool.wire import MAX_FRAME, ExhaustedError, Load, VerifierJob
from rlvr.verifiers.pool.worker_process import Background, DeadlineExceededError, Forker, Server, Worker, WorkerError

log = logging.getLogger(__name__)

# Arbitrary: what is kept is the verifier and its pickle.
MAX_SENT = 1024
"""Verifiers that are not pickled again when they are asked for again."""
# 256 MB, arbitrary: its template would hold a copy of what the trainer holds already.
MAX_BYTES = 2**28
"""A verifier that holds more (a model, say) stays in the trainer's process."""
# Arbitrary: each keeps a process with its imports in memory.
MAX_GROUPS = 32
"""Verifiers that are kept loaded; the one longest unused gives way."""
# Arbitrary: a bound for a host on which every process is killed.
MAX_TRIES = 5
"""Attempts at a job when the server or the template that should give it a worker has died."""
# Loading may take seconds or fail at once: without the pause every answer would pay for it.
RETRY_SECONDS = 60.0
"""Seconds before a verifier that could not be loaded is tried again."""
LATE = "gave no verdict within its time limit"
EXHAUSTED = "exhausted"
"""Keys of warnings that a group gives once."""
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
"""Signals of a process that crashed by itself; SIGKILL comes from outside."""


class LoadError(Exception):
    """A verifier cannot be loaded in a process of its own. `crashed`: it ended that process or never came back.
    `traceback`: that of the exception that its import raised; without one, the reason."""

    def __init__(self, reason: str, crashed: bool, traceback: str = "") -> None:
        super().__init__(reason)
        self.crashed = crashed
        self.traceback = traceback or reason


class WorkerGroups:
    """The worker groups of a pool, and the servers that fork them. For one event loop."""

    def __init__(self, memory_mb: int, most: int) -> None:
        self.memory_mb = memory_mb
        self.most = most
        self.background = Background()
        self.closed = False
        self._servers: dict[Any, Server] = {}
        self._sent: OrderedDict[int, tuple[Any, Load | str]] = OrderedDict()
        self._worker_groups: OrderedDict[Load, WorkerGroup] = OrderedDict()

    def of(self, verifier: Verifier) -> WorkerGroup | str:
        """The worker group of a verifier, or the reason why it can have none. A verifier is pickled when it is first
        used; those with the same pickle share a group."""
        owner = _owner(verifier)
        # The owner is kept beside its pickle, so that its id stays its own.
        if id(owner) not in self._sent:
            self._sent[id(owner)] = owner, packed(verifier)
            if len(self._sent) > MAX_SENT:
                self._sent.popitem(last=False)
        self._sent.move_to_end(id(owner))
        load = self._sent[id(owner)][1]
        if isinstance(load, str):
            return load
        if load not in self._worker_groups:
            self._worker_groups[load] = WorkerGroup(self, verifier, load)
            self._drop_unused()
        self._worker_groups.move_to_end(load)
        return self._worker_groups[load]

    def refuse(self, verifier: Verifier, reason: str) -> None:
        """Give the verifier no worker group from now on."""
        for key, (owner, _) in self._sent.items():
            if owner is _owner(verifier):
                self._sent[key] = owner, reason

    def server(self, sandbox: tuple[str, ...] | None) -> Server:
        """The server, started when first asked for and again when it is gone; one per set of readable files in a
        sandbox. WorkerError once the pool is closed: nobody would end it."""
        if self.closed:
            raise WorkerError("the pool is closed")
        server = self._servers.get(sandbox)
        if server is None or not server.alive:
            if server is not None:
                self.background.start(server.close())
            server = self._servers[sandbox] = Server(self.memory_mb, None if sandbox is None else sandboxed(sandbox))
        return server

    @property
    def alive(self) -> int:
        """Number of workers."""
        return sum(worker_group.alive for worker_group in list(self._worker_groups.values()))

    def trim(self, keep: WorkerGroup) -> None:
        """End idle workers of other groups until one more worker is within bounds."""
        # An idle worker of another verifier gives way; busy ones do not, so `most` may be passed for a while.
        over = self.alive + 1 - self.most
        for worker_group in self._worker_groups.values():
            while over > 0 and worker_group is not keep and worker_group.idle:
                worker_group.dismiss(worker_group.idle.pop(0))
                over -= 1

    async def close(self) -> None:
        """End all processes."""
        self.closed = True
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        await self.background.done()  # servers that were given up because they did not answer: stopped, say
        for worker_group in self._worker_groups.values():
            worker_group.forget()

    def _drop_unused(self) -> None:
        for load, worker_group in list(self._worker_groups.items())[:-1]:
            if len(self._worker_groups) > MAX_GROUPS and not worker_group.busy:
                self.background.start(self._worker_groups.pop(load).disband())


def _owner(verifier: Verifier) -> Any:
    """Return the object that stands for all equal verifiers, which are sent once: a function, however often it is
    wrapped, or the verifier."""
    if isinstance(verifier, FunctionVerifier):
        return verifier.call.function
    return verifier


def packed(verifier: Verifier) -> Load | str:
    """Return the verifier ready for sending, or the reason why it cannot be sent.

    By cloudpickle, so that functions of a notebook, of `__main__` and closures can be sent, too.
    """
    try:
        body = cloudpickle.dumps(verifier)
    except Exception as error:  # pickling runs the verifier's own code
        return f"cannot be sent to a worker process ({type(error).__name__}: {error})"
    if len(body) > MAX_BYTES:
        return f"cannot be sent to a worker process (it holds {len(body) >> 20} MB)"
    # A module made of a file (rlvr.registry) is known by that file only.
    # Searched for as bytes: the pickle names the modules of the classes and functions that it refers to. A name too
    # many only loads a file.
    names = [name for name in list(sys.modules) if name.startswith(FILE_MODULE) and name.encode() in body]
    return Load(body, tuple((name, str(sys.modules[name].__file__)) for name in names))


@dataclass
class WorkerTemplate:
    """A process that has loaded a verifier. `forks`: it may be forked; else it has threads, and is to work itself."""

    process: Worker
    forker: Forker
    forks: bool


class WorkerGroup:
    """The workers of one verifier."""

    def __init__(self, groups: WorkerGroups, verifier: Verifier, load: Load) -> None:
        self.groups = groups
        self.verifier = verifier
        self.load = load
        self.idle: list[Worker] = []
        self.alive = 0
        self.busy = 0
        self._template: asyncio.Task[WorkerTemplate] | None = None
        self._failure: LoadError | None = None
        self._failed_at = 0.0
        self._has_decided = False
        """True once a worker has given a score: at least one answer did not need too much memory."""
        self._warned: set[str] = set()
        """The warnings that were given, each once."""

    async def run(self, job: VerifierJob, limit: float) -> list[Verdict]:
        """The verdicts of one job; a worker that broke off is worth a second try, and one that has used up a resource
        is worth one in a fresh worker. LoadError, PicklingError."""
        body = pickle.dumps(job)
        count = len(job.completions)
        exhausted: ExhaustedError | None = None
        broken = WorkerError("the pool is closed")
        deaths = 0
        tries = 0
        self.busy += 1
        try:
            # At most two workers are given the job, since the answer may be what ends them. Tries that failed before
            # there was a worker (a dead server or template) are counted apart.
            while deaths < 2 and tries < MAX_TRIES and not self.groups.closed:
                tries += 1
                try:
                    worker = await self._take(fresh=exhausted is not None)
                    deaths += 1
                    return await self._on(worker, body, limit, count)
                except DeadlineExceededError as error:
                    return [self._too_late(error, limit, job.group)] * count
                except ExhaustedError as error:
                    # The second time, in a fresh worker: earlier answers cannot be the cause.
                    if exhausted is not None:
                        return [self._too_much(error, job.group)] * count
                    exhausted = error
                    self._warn(error)
                except WorkerError as error:
                    broken = error
            return [self._broken(broken, job.group)] * count
        finally:
            self.busy -= 1

    async def _on(self, worker: Worker, body: bytes, limit: float, count: int) -> list[Verdict]:
        try:
            verdicts = await worker.run(body, limit, count)
            self._has_decided = self._has_decided or any(verdict.decided for verdict in verdicts)
        except WorkerError as error:
            # Waited for, since the exit code decides whether the answer crashed the verifier; shielded, since a
            # dismissal that is cut off would leave the process.
            error.code = await asyncio.shield(self.dismiss(worker))
            if error.code is not None and -error.code in CRASHES:
                self._tell_stacks("crashed", worker)
            raise
        except DeadlineExceededError:
            self.dismiss(worker, late=True)
            raise
        except BaseException:  # cancelled
            self.dismiss(worker)
            raise
        self.idle.append(worker)
        return verdicts

    def dismiss(self, worker: Worker, late: bool = False) -> asyncio.Task[int | None]:
        """End a worker, without waiting for it. The first one that is `late` is asked where it hangs."""
        self.alive -= 1
        worker.link.close()
        if late and LATE not in self._warned:
            return self.groups.background.start(self._end_late(worker))
        return self.groups.background.start(worker.end())

    async def _end_late(self, worker: Worker) -> int | None:
        code = await worker.end(ask_stacks=True)
        self._tell_stacks(LATE, worker)
        return code

    async def disband(self) -> None:
        """End all processes of the group."""
        self.forget()
        if self._template is not None:
            async with Deadline(worker_process.START_SECONDS):
                template = await asyncio.shield(self._template)
            await template.process.end()

    def forget(self) -> None:
        """Close what leads to processes that are gone."""
        for worker in self.idle:
            worker.forget()
        self.idle.clear()
        if self._template is not None and self._template.done() and not self._template.exception():
            self._template.result().process.forget()

    async def _take(self, fresh: bool = False) -> Worker:
        """A worker for one job, `fresh` from its template or one that has waited."""
        # From the end of the list: the worker used last has its pages in the caches.
        while self.idle and not fresh:
            worker = self.idle.pop()
            if worker.link.quiet:
                return worker
            self.dismiss(worker)
        self.groups.trim(self)
        background = self.groups.background
        while True:
            # One task starts the template, and all that come meanwhile wait for it.
            if self._template is None:
                if self._failure is not None and time.monotonic() < self._failed_at + RETRY_SECONDS:
                    raise self._failure
                self._template = background.start(self._start())
            starting = self._template
            try:
                # Shielded: the start belongs to all who wait, not to the one that is cancelled.
                template = await asyncio.shield(starting)
                if not template.forks:
                    if self._template is not starting:
                        continue  # somebody else has taken it
                    self._template = None
                    worker = template.process
                    worker.promote()
                else:
                    # Whole: a fork that was asked for and not taken would leave a process that nobody knows.
                    worker = await background.whole(template.forker.fork(), self._return)
                self.alive += 1
                return worker
            except (WorkerError, LoadError):
                if self._template is starting:
                    self._template = None
                    # It has died or does not answer: the server reaps it, and kills what its workers started.
                    if starting.done() and not starting.cancelled() and starting.exception() is None:
                        background.start(starting.result().process.end())
                raise

    async def _return(self, worker: Worker) -> None:
        self.alive += 1
        self.idle.append(worker)

    async def _start(self) -> WorkerTemplate:
        """A new template. LoadError when the verifier cannot be loaded, WorkerError when the server is gone."""
        if self.verifier.needs.sandbox:
            sandbox = tuple(sorted(readable(self.verifier)))
        else:
            sandbox = None
        server = self.groups.server(sandbox)
        process = await server.fork()
        try:
            try:
                async with Deadline(worker_process.START_SECONDS):
                    await process.link.send(pickle.dumps(self.load))
                    reply = json.loads(await process.link.receive(MAX_FRAME))
            except TimeoutError:
                await process.end(ask_stacks=True)
                reason = f"it did not load within {worker_process.START_SECONDS:g} s"
                raise LoadError(reason, True, f"{process.stacks}\n{reason}".strip()) from None
            except (OSError, EOFError):
                code = await server.end(process.pid)
                reason = f"its process ended with code {code} while loading it"
                raise LoadError(reason, True, f"{process.stacks}\n{reason}".strip()) from None
            if reply["problem"] is not None:
                raise LoadError(reply["problem"], crashed=False, traceback=reply["traceback"])
            return WorkerTemplate(process, Forker(process.link), reply["forks"])
        except BaseException as error:
            # Remembered for RETRY_SECONDS; a server that died is not the verifier's fault and is not.
            if isinstance(error, LoadError):
                self._failure = error
                self._failed_at = time.monotonic()
            await process.end()
            raise

    def _tell_stacks(self, what: str, worker: Worker) -> None:
        """Warn, once for each, that a worker `what`, with the stacks that it has written."""
        if what not in self._warned and worker.stacks:
            self._warned.add(what)
            log.warning(
                "a worker process of the verifier %r %s and was replaced; the stacks of its threads then (logged "
                "once):\n%s",
                display_name(self.verifier),
                what,
                worker.stacks,
            )

    def _warn(self, error: ExhaustedError) -> None:
        if EXHAUSTED not in self._warned:
            self._warned.add(EXHAUSTED)
            log.warning(
                "a worker process of the verifier %r ran out of a resource (%s); it is replaced and the answer is "
                "checked once more. An answer that runs out of memory there, too, scores 0 if another answer did "
                "not, and is undecided otherwise; without another resource it is undecided. The address space is "
                "limited by verification.memory_mb=%d; a verifier that keeps what it allocates or opens gets a new "
                "process whenever that is used up (logged once)",
                display_name(self.verifier),
                error,
                self.groups.memory_mb,
            )

    def _too_much(self, error: ExhaustedError, group: bool) -> Verdict:
        """The verdict where a fresh worker ran out, too: the answer's fault where it was memory, which it alone used,
        and which was enough for another answer. Until then it may be the verifier that needs more for every answer."""
        if error.memory and not group and self._has_decided:
            return Verdict(VerdictStatus.ERROR, 0.0, "the answer needs more memory than a worker has")
        reason = f"{display_name(self.verifier)} ran out of a resource in a fresh worker process: {error}"
        if error.memory:
            reason += f"; verification.memory_mb={self.groups.memory_mb} may be too little for it"
        return Verdict.undecided(reason, traceback=f"{error.traceback}\n{reason}" if error.traceback else reason)

    def _too_late(self, error: DeadlineExceededError, limit: float, group: bool) -> Verdict:
        needs = self.verifier.needs
        reason = f"no verdict after {limit:g} s: "
        if group:
            reason += "the group's, so that no one answer is to blame"
        elif needs.remote or (isinstance(self.verifier, FunctionVerifier) and not error.computing):
            reason += "the function was waiting, not computing, so the answer is not to blame"
        else:
            return Verdict(VerdictStatus.TIMEOUT, 0.0, f"the answer took more than {limit:g} s", seconds=error.seconds)
        return Verdict.undecided(reason, VerdictStatus.TIMEOUT, seconds=error.seconds)

    def _broken(self, error: WorkerError, group: bool) -> Verdict:
        if self.groups.closed:
            return Verdict.undecided("the verifier pool is closed")
        # Twice the same signal with the same answer: the answer is to blame. In a group nobody knows which one.
        if error.code is not None and -error.code in CRASHES and not group:
            name = signal.Signals(-error.code).name
            return Verdict(VerdictStatus.ERROR, 0.0, f"the answer made the verifier crash ({name}), twice")
        if error.code is None:
            ended = ""
        else:
            ended = f"; it ended with code {error.code}"
        return Verdict.undecided(f"the worker process died twice: {error}{ended}")
