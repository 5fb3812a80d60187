"""What a zygote does before its first job, so that its forks find it done: imports, and rehearsals of a job.

Rehearsals fill the interpreter's caches of lookups, specialise what a job runs and have the linker bind what it calls. Each
fork would else do that again, and copy every page that it changes by it. They leave nothing behind: no descriptor, process or
module, and no lock on the zygote.
"""

from __future__ import annotations

import importlib
import json
import linecache
import os
import resource
import socket
import sys

from rlvr.verifiers.code.sandbox.inside import frames, kernel, landlock, program, supervisor
from rlvr.verifiers.code.sandbox.inside.supervisor import Order, Setting

_MODULES = (
    *("math", "cmath", "heapq", "itertools", "functools", "operator", "bisect", "collections", "re", "string"),
    *("random", "copy", "typing", "io", "datetime", "decimal", "fractions", "traceback", "threading"),
    *("dataclasses", "statistics"),
)
"""What programs are likely to import."""
_REHEARSALS = 10
"""Python specialises a function at its eighth call."""
_OPEN = Setting(namespaces=False, landlock=False, seccomp=False, processes_beside=None)
_HEAD = b'{"seconds": 10, "memory_mb": 256, "output_bytes": 4096, "processes": 1, "file_mb": 1}\n'
_SCRIPT = b'{"kind": "script"}'
_SOURCE = b"print(1)\n"
_NAME = "rehearsal"


def warm() -> None:
    """Import what programs are likely to import."""
    for name in _MODULES:
        importlib.import_module(name)


def rehearse() -> None:
    """Go through a job, but for what cannot be undone. For a process of one thread that is the parent of no other."""
    for _ in range(_REHEARSALS):
        before = set(os.listdir("/proc/self/fd"))
        _supervise()
        _lock()
        _load()
        for fd in set(os.listdir("/proc/self/fd")) - before:
            if os.path.lexists(f"/proc/self/fd/{fd}"):  # but the one of listdir itself
                os.close(int(fd))


def _supervise() -> None:
    """The supervisor's part, with a program of ours that is not isolated."""
    job, trainer = socket.socketpair()
    channel, order = socket.socketpair()
    with job, trainer, channel, order:
        frames.send(trainer, _HEAD)
        frames.send(order, _SCRIPT)
        frames.send(order, _SOURCE)
        head, _, stdin = (frames.receive(job) or b"").partition(b"\n")
        supervisor.run(job, channel, _OPEN, Order(**json.loads(head)), stdin)


def _lock() -> None:
    """What of a program's lock does nothing to a process without rights."""
    landlock.version()
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))


def _load() -> None:
    """The program's part."""
    stdout = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as sys.stdout:
        program.load(_SOURCE.decode(), _NAME)
    sys.stdout = stdout
    del sys.modules[_NAME]
    linecache.clearcache()
