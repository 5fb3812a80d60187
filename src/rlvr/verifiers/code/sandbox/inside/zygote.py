"""A warmed interpreter that forks a supervisor for each job, one ahead, so that no job waits for its namespaces.

Invariants: it has one thread, receives nothing of a job (the waiting supervisor takes the job's descriptors itself),
and ends, and with it everything below it, when its control socket closes or the trainer dies, however it dies.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from rlvr.verifiers.code import values
from rlvr.verifiers.code.sandbox.inside import kernel, landlock, sealing, seccomp
from rlvr.verifiers.code.sandbox.inside.interpreter import prepare
from rlvr.verifiers.code.sandbox.inside.job_limits import Setting
from rlvr.verifiers.code.sandbox.inside.supervisor import supervise

READY = b"R"
LINKED_AT_ONCE = "LD_BIND_NOW"
"""The variable that has the dynamic linker find all functions when it loads a library, and not each at its first call,
in every fork."""
_WARM_MODULES = """
    math cmath heapq itertools functools operator bisect collections re string random copy typing io datetime decimal
    fractions traceback threading dataclasses statistics
"""
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that keep numpy's libraries from starting threads, which a fork would lose."""


def main() -> None:
    """`python -c ... CONTROL_FD TRAINER_PIDFD SETTING`: the setting as JSON, TRAINER_PIDFD a pidfd of the trainer."""
    control_fd = int(sys.argv[-3])
    trainer_pidfd = int(sys.argv[-2])
    setting = Setting(**json.loads(sys.argv[-1]))
    # It has done its work when the interpreter's libraries were loaded; programs must not inherit it.
    os.environ.pop(LINKED_AT_ONCE, None)
    if setting.user is not None:
        # Groups before the user: after setresuid the process may not change them any more.
        os.setgroups([])
        os.setresgid(setting.user, setting.user, setting.user)
        os.setresuid(setting.user, setting.user, setting.user)
    # Forks write their user maps only if they are dumpable. Without namespaces the memory of a dumpable process can be
    # read by every process of its user: a candidate would read its test there, so only candidates are dumpable
    # (`run_program`).
    kernel.set_dumpable(setting.namespaces)
    # A tier that lacks a part does not start: the self-test fails, and `auto` goes on to a weaker one.
    if setting.landlock and not landlock.version():
        sys.exit("this kernel has no Landlock")
    if setting.seccomp and not seccomp.PROGRAM:
        sys.exit("there is no system call filter for this machine")
    if setting.packages:
        os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
        sys.path.append(setting.place)
    # Imported once here, every program has them without reading a file.
    for name in _WARM_MODULES.split():
        importlib.import_module(name)
    _have_packages(setting.packages)
    # The kernel drops signals to process 1 of a namespace unless it handles them, and Python's own handler of SIGINT
    # would let a program end its supervisor.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    prepare()
    # Collected, so that no garbage is frozen; frozen, so that a collection in a fork writes to none of these objects'
    # pages.
    gc.collect()
    gc.freeze()
    gc.disable()  # until a program runs: looking at objects is writing to them
    control = socket.socket(fileno=control_fd)
    # The trainer waits for this byte with a deadline; what was printed before it is the reason of a failure.
    control.send(READY)
    _serve(control, trainer_pidfd, setting)


def _have_packages(names: Sequence[str]) -> None:
    """Import packages. Of theirs, too, what is imported later may run after a process was sealed."""
    for name in names:
        package = importlib.import_module(name)
        sealing.LIBRARIES.append(os.path.dirname(str(package.__file__)) + os.sep)
    if "numpy" in names:
        from rlvr.verifiers.code.sandbox.inside import arrays

        values.make_array = arrays.made


def _serve(control: socket.socket, trainer_pidfd: int, setting: Setting) -> None:
    """Keep one supervisor waiting, until the trainer is gone."""
    while True:
        # The supervisor holds `ours`. Its end, seen as POLLHUP on `taken`, means that it took a job or that it died;
        # both ask for the next one.
        taken, ours = os.pipe2(os.O_CLOEXEC)
        try:
            pid = kernel.clone(kernel.NAMESPACES if setting.namespaces else 0)
        except OSError:
            pid = -1
        if pid == 0:
            # Nothing below the zygote may hold a handle of the trainer, by which it could send it signals
            # (pidfd_send_signal).
            os.close(trainer_pidfd)
            os.close(taken)
            supervise(control, ours, setting)
        if pid > 0:
            os.close(ours)  # so that the pipe ends where the supervisor takes a job, or ends
        poll = select.poll()
        poll.register(trainer_pidfd, select.POLLIN)
        # POLLHUP is always reported. Jobs are looked for only when no supervisor could be made: one that waits reads
        # them itself.
        poll.register(control, 0 if pid > 0 else select.POLLIN)
        poll.register(taken, 0)
        ready = dict(poll.poll())
        os.close(taken)
        # A pidfd is readable when its process has ended, SIGKILL included. Returning ends this process, and the kernel
        # all below it.
        if trainer_pidfd in ready or ready.get(control.fileno(), 0) & select.POLLHUP:
            return
        # No process could be made (the limit of the host). The job's descriptors are taken and closed, so that the
        # trainer sees its end and tries another zygote.
        if pid < 0:
            os.close(ours)
            for fd in socket.recv_fds(control, 1, 2)[1]:
                os.close(fd)
