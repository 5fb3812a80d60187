"""The processes that fork: one warm server, and below it one template per verifier, from which its workers are forked.

The server is started by exec, `main` with the number of its control socket and the process id of the trainer, and knows
no verifier. On request it forks a template, which loads one verifier (the import of a user's file, the seconds that
SymPy takes) and then forks workers in milliseconds. So a verifier whose import crashes or hangs costs its template
only. These are the only processes of the library that are forked: core/process/child_process starts by exec, and has no
part in starting and reaping them.

Invariants: every process here has one thread when it forks (a template that has more becomes a worker itself); each
child leads a session of its own; it is killed, with what it forked, when its parent ends or is asked to end it; a child
is reaped only after it was killed, so no process id is used again while anybody may still mean the old one. The server
ends, and everything below it, when its control socket closes or the trainer dies, however it dies.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from rlvr.core.process import tracing
from rlvr.core.process.framing import receive, receive_fds, send
from rlvr.core.process.parent_death import adopt_orphans, signal_on_parent_death
from rlvr.errors import user_traceback
from rlvr.records import cut
from rlvr.registry import load_file
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.pool.wire import END, FORK, REPLY, REQUEST, STACKS, WORK, Load
from rlvr.verifiers.pool.worker import work

Run = Callable[[socket.socket], None]
"""The work of a forked child on its socket."""


def main() -> None:
    """The server: `python -c "..." CONTROL_FD TRAINER_PID MEMORY_MB`; a trainer of 0 is not looked for."""
    control_fd, trainer, memory_mb = (int(argument) for argument in sys.argv[1:4])
    # Standard input is nothing, so that a verifier which reads it gets the end; what it prints goes where errors go,
    # since nobody reads its output.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    tracing.write_stacks()
    family = Family()

    def on_death(*_: object) -> None:
        if os.getppid() != trainer:  # the kernel also says so when only the thread that started us has ended
            family.end_all()
            os._exit(0)

    if trainer:
        signal.signal(signal.SIGTERM, on_death)
        signal.signal(signal.SIGCONT, on_death)
        signal_on_parent_death(trainer, signal.SIGCONT)  # which also wakes a server that somebody has stopped
    gc.freeze()
    # It was inherited over exec, and is not to be inherited further.
    os.set_inheritable(control_fd, False)
    family.serve(socket.socket(fileno=control_fd), functools.partial(template, memory_mb=memory_mb))


def template(control: socket.socket, memory_mb: int) -> None:
    """Load the verifier that the first frame holds, say so, and fork its workers on request."""
    body = receive(control)
    if body is None:
        return
    problem = None
    verifier = None
    trace = ""
    try:
        verifier = load(pickle.loads(body))
    except BaseException as error:  # the user's code: SystemExit too costs its verdicts only
        problem = cut(f"{type(error).__name__}: {error}")
        trace = cut(user_traceback(error))
    # JSON, not a pickle: this process has run the user's code.
    send(control, json.dumps({"problem": problem, "traceback": trace, "forks": _threads() == 1}).encode())
    if verifier is not None:
        gc.freeze()
        Family().serve(control, functools.partial(work, verifier=verifier, memory_mb=memory_mb))


def load(sent: Load) -> Verifier:
    """The verifier, ready to be called."""
    for name, path in sent.files:
        if name not in sys.modules:
            load_file(name, Path(path))
    verifier: Verifier = pickle.loads(sent.verifier)
    verifier.prepare()
    return verifier


class Family:
    """The children of this process."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        adopt_orphans()

    def serve(self, control: socket.socket, run: Run) -> None:
        """Do what the trainer asks for until it closes the socket; `run` is what a forked child does."""
        try:
            while True:
                # A request and its descriptor come in one message; a short read is the end of the stream.
                request, fds = receive_fds(control, REQUEST.size, 2)
                if len(request) < REQUEST.size:
                    return
                what, pid = REQUEST.unpack(request)
                if what == FORK:
                    answer = self.fork(control, fds[0], fds[1], run)
                elif what == STACKS:
                    # By number: a child that was not reaped keeps its own.
                    answer = int(pid in self.pids and tracing.request_stacks([pid]))
                elif what == END:
                    answer = self.end(pid)
                else:
                    assert what == WORK
                    run(control)
                    return
                control.sendall(REPLY.pack(answer))
        except ConnectionError:
            return
        finally:
            self.end_all()

    def fork(self, control: socket.socket, fd: int, stacks: int, run: Run) -> int:
        """The process id of a new child that serves the socket `fd` and writes its stacks to `stacks`; 0 when the
        system has none to spare. A pidfd of it goes to the trainer over `fd`."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(fd)
            os.close(stacks)
            return 0
        if pid == 0:
            try:
                # The child must not read its parent's requests.
                control.close()
                # The server's handler ends the server's children, which are not this process's.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                # A session of its own, so that `killpg` reaches what the verifier starts.
                os.setsid()
                # After fork and before the user's code, which could not be trusted to end.
                signal_on_parent_death(parent, signal.SIGKILL)
                tracing.write_stacks(stacks)
                run(socket.socket(fileno=fd))
            finally:
                os._exit(0)
        os.close(stacks)
        self.pids.add(pid)
        with socket.socket(fileno=fd) as job:
            try:
                # A descriptor and not the number: in a sandbox processes have other numbers than outside.
                pidfds = [os.pidfd_open(pid)]
            except (OSError, AttributeError):
                # An old kernel, a filter of system calls: the end of the socket alone tells that the worker has ended.
                pidfds = []
            try:
                # The first bytes on this socket: the trainer sends a job only after the answer to this request.
                socket.send_fds(job, [b"P"], pidfds)
            finally:
                for pidfd in pidfds:
                    os.close(pidfd)
        return pid

    def end(self, pid: int) -> int:
        """Kill a child, its session and what it left behind, and reap them; its exit code, negative for a signal."""
        if pid not in self.pids:
            return 0
        # Both: the child itself, which may not lead a group yet, and everything that is in its group.
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        # Reaped only now: before, its number stays its own, so the kills above cannot hit another process.
        _, status = os.waitpid(pid, 0)
        self.pids.discard(pid)
        # Processes that left their group become children of this one when their parent ends (subreaper). Until there
        # are none, since killing one may hand over its children.
        while strays := _children() - self.pids:
            for stray in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(stray, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(stray, 0)
        return os.waitstatus_to_exitcode(status)

    def end_all(self) -> None:
        """Kill and reap every child."""
        for pid in list(self.pids):
            self.end(pid)


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return 1


def _children() -> set[int]:
    try:
        return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
    except OSError:
        return set()
