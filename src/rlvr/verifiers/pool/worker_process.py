"""The trainer's end of the pool's processes: ask one that forks for a child, give a worker a job, end it.

Invariants: the server is started by exec, never forked from the trainer (which may hold CUDA, threads and locks), and
sees no GPU; what is asked of a process that forks is asked whole, whoever is cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rlvr.core.daemon_calls import awaited_in_daemon
from rlvr.core.process.child_process import kill_marked, spawn, stop
from rlvr.core.process.deadline import Deadline
from rlvr.core.process.framing import Link, receive_fds
from rlvr.core.process.parent_death import state
from rlvr.core.process.tracing import StackPipe
from rlvr.records import Verdict
from rlvr.verifiers.pool.printed import forwarded
from rlvr.verifiers.pool.wire import END, FORK, MAX_FRAME, REPLY, REQUEST, STACKS, WORK, verdicts_from_json

T = TypeVar("T")

START_SECONDS = 120.0
"""Wall clock for the server to start, or for a template to load a verifier: our time, not an answer's."""
FORK_SECONDS = 10.0
"""Wall clock for a process that forks to answer; past it, it is given up."""

MARK = "RLVR_VERIFIER_SERVER"
"""Environment variable by which the processes below a server are known, whatever group they are in."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process with several threads cannot be forked safely, and their stacks would count as memory."""


class WorkerError(Exception):
    """A process ended, or spoke nonsense, without a kill of ours."""

    code: int | None = None
    """Its exit code, negative for a signal, where known."""


class DeadlineExceededError(Exception):
    """A job's time limit passed. `computing`: its process was running then, not waiting."""

    def __init__(self, seconds: float, computing: bool) -> None:
        super().__init__(f"no verdict after {seconds:.3g} s")
        self.seconds = seconds
        self.computing = computing


class Forker:
    """A process that forks: the server, or a template."""

    def __init__(self, link: Link, timeout: float = FORK_SECONDS) -> None:
        self.link = link
        self.timeout = timeout
        # One request at a time: an answer has no number, and is that of the request before it.
        self._turn = asyncio.Lock()

    async def fork(self) -> Worker:
        """A new child. WorkerError when there is none to be had."""
        ours, theirs = socket.socketpair()
        pipe = StackPipe()
        try:
            pid = await self._ask(FORK, fds=[theirs.fileno(), pipe.writer])
            if not pid:
                raise WorkerError("the system has no process to spare")
            # Its parent has sent it before the answer. None came if this process has no descriptor left: then only the
            # closed socket tells of the end.
            _, pidfds = receive_fds(ours, 1, 1, socket.MSG_DONTWAIT)
        except BlockingIOError as error:
            ours.close()
            pipe.close()
            raise WorkerError("the process that forks is broken") from error
        except BaseException:
            ours.close()
            pipe.close()
            raise
        finally:
            theirs.close()
            os.close(pipe.writer)
        return Worker(self, pid, Link(ours, *pidfds), pipe)

    async def request_stacks(self, pid: int) -> bool:
        """Ask a child for the stacks of its threads, and return True if it will write them."""
        return bool(await self._ask(STACKS, pid))

    async def end(self, pid: int) -> int:
        """Kill a child with all that it forked, reap it; its exit code. WorkerError when this process is gone too."""
        return await self._ask(END, pid)

    async def _ask(self, what: bytes, pid: int = 0, fds: Sequence[int] = ()) -> int:
        async with self._turn:
            try:
                async with Deadline(self.timeout):
                    socket.send_fds(self.link.sock, [REQUEST.pack(what, pid)], fds)
                    (answer,) = REPLY.unpack(await self.link.take(REPLY.size))
                    # The first answer waits for the imports of the server; from then on a fork takes milliseconds.
                    self.timeout = FORK_SECONDS
                    return answer
            except TimeoutError:
                self.link.close()  # a late answer would be taken for another's
                raise WorkerError(f"it did not answer for {self.timeout:g} s") from None
            except (OSError, EOFError) as error:
                self.link.close()
                raise WorkerError(f"the process that forks has ended ({error})") from error


class Server(Forker):
    """The warm server, as a child of the trainer."""

    def __init__(self, memory_mb: int, wrap: Callable[[list[str]], list[str]] | None = None) -> None:
        """Start it; its imports go on while the first request is already on its way. `wrap` rewrites the command."""
        ours, theirs = socket.socketpair()
        trainer = os.getpid() if wrap is None else 0
        code = "from rlvr.verifiers.pool.server import main; main()"
        # -P: the working folder is not searched for modules before the standard library.
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(trainer), str(memory_mb)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # No GPU: a verifier that used one would take memory that the trainer has planned with.
        self._mark = secrets.token_hex(16)
        own = {**ONE_THREAD, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, MARK: self._mark}
        prints = forwarded()
        try:
            environment = own
            if wrap is None:
                environment = {**os.environ, **own}
            else:
                command = wrap(command)
            self.process = spawn(command, environment, prints, pass_fds=[theirs.fileno()])
        finally:
            theirs.close()
            os.close(prints)
        super().__init__(Link(ours), START_SECONDS)

    @property
    def alive(self) -> bool:
        """Return True if the process runs and can take a job."""
        return self.link.open and self.process.poll() is None

    async def close(self) -> None:
        """End the server, which ends everything below it."""
        self.link.close()
        await stop(self.process)
        # One that was killed has ended nothing. The kernel kills its templates and workers then, but not what these
        # started.
        if self.process.returncode != 0:
            await awaited_in_daemon(lambda: kill_marked(MARK, self._mark), "verifier-leftovers")


class Worker:
    """A forked process: a worker, for one job at a time, or a template, which may become one."""

    def __init__(self, parent: Forker, pid: int, link: Link, pipe: StackPipe) -> None:
        self.parent = parent
        self.pid = pid
        self.link = link
        self._pipe = pipe

    def promote(self) -> None:
        """Have a template become a worker."""
        with contextlib.suppress(OSError):  # it has ended: the first job will tell
            self.link.sock.send(REQUEST.pack(WORK, 0))

    async def run(self, job: bytes, limit: float, count: int) -> list[Verdict]:
        """The `count` verdicts of one job. Late past `limit` seconds of this loop, WorkerError when the process is gone
        or sends nonsense, ExhaustedError when it has used up a resource; after each it must be ended."""
        start = time.perf_counter()
        try:
            async with Deadline(limit):
                await self.link.send(job)
                body = await self.link.receive(MAX_FRAME)
            # A worker that answers more than it was asked would shift all later replies to other answers.
            if self.link.has_unread:
                raise EOFError("more came than one reply")
        except TimeoutError:
            now = state(self.pid)
            if now in ("Z", "X"):
                raise WorkerError("it has ended without a reply") from None
            raise DeadlineExceededError(time.perf_counter() - start, now in ("R", None)) from None
        except (OSError, EOFError) as error:
            raise WorkerError(str(error)) from error
        try:
            return verdicts_from_json(body, count)
        except ValueError as error:
            raise WorkerError(f"its reply is no verdict: {error}") from error

    @property
    def stacks(self) -> str:
        """The stacks of its threads, if it was asked for them or has crashed."""
        return self._pipe.text()

    async def end(self, ask_stacks: bool = False) -> int | None:
        """Kill and reap the process; its exit code, None when nobody knows it any more. `ask_stacks`: it is asked for
        the stacks of its threads before."""
        self.link.close()
        try:
            if ask_stacks and await self.parent.request_stacks(self.pid):
                await self._pipe.written()
            return await self.parent.end(self.pid)
        except WorkerError:
            return None
        finally:
            self._pipe.close()

    def forget(self) -> None:
        """Close what leads to the process, which is gone."""
        self.link.close()
        self._pipe.close()


class Background:
    """Tasks that are carried through whatever becomes of those who wait for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def whole(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, Any]]) -> T:
        """The result of a coroutine; `undo` is given the result when the caller was cancelled meanwhile."""
        task = self.start(coroutine)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The caller has gone, the task goes on: what it makes (a worker) has to be put somewhere.
            if not task.cancelled():
                task.add_done_callback(
                    lambda t: self.start(undo(t.result())) if not t.cancelled() and not t.exception() else None
                )
            raise

    async def done(self) -> None:
        """Wait for all tasks."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
