"""A worker process: verifies one answer at a time for the pool that started it.

Started as `python -m rlvr.verifiers.pool.worker MEMORY_MB PARENT_PID`; it speaks the frames of rlvr.verifiers.pool.wire. In: a
pickled `Job` per answer. Out, as JSON, which cannot run code in the trainer: `{}` when the verifier is loaded and the clock may start, then the verdict.

Invariants: the pipes are private (what a verifier prints goes to stderr); the process dies with its parent and spends no
more address space than it was given; it never writes anything but the two frames of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

from rlvr.records import Verdict, VerdictStatus
from rlvr.verifiers.base import Verifier, judged
from rlvr.verifiers.pool.wire import LENGTH

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve jobs until the pipe closes."""
    memory_mb, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    limit = memory_mb * 2**20
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs, verdicts = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with asyncio.Runner() as runner:
        while (body := receive(jobs)) is not None:
            serve(body, verdicts, runner)


def serve(body: bytes, verdicts: IO[bytes], runner: asyncio.Runner) -> None:
    """Answer one job with its two frames."""
    verifier, job, verdict = None, None, None
    try:
        job = pickle.loads(body)
        verifier = load(job.verifier, job.files)
    except Exception as error:
        verdict = Verdict.undecided(f"the verifier cannot be loaded: {type(error).__name__}: {error}")
    send(verdicts, {})
    try:
        if verifier is not None and job is not None:
            verdict = runner.run(judged(verifier, job.task, job.completion, call=bounded))
        assert verdict is not None
        send(verdicts, verdict.to_json())
    except BaseException as error:  # a verdict that is no JSON, KeyboardInterrupt raised by a verifier ...
        send(verdicts, Verdict.undecided(f"{type(error).__name__}: {error}").to_json())


async def bounded(verify: Callable[[], Any]) -> Any:
    """What `verify` returns; memory that the answer spent is the answer's fault, so it scores 0."""
    try:
        return verify()
    except MemoryError:
        return Verdict(VerdictStatus.ERROR, 0.0, reason="the answer needs more memory than a worker has")


@functools.lru_cache(maxsize=16)
def load(pickled: bytes, files: tuple[tuple[str, str], ...]) -> Verifier:
    """The verifier, ready to be called."""
    for name, path in files:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    verifier: Verifier = pickle.loads(pickled)
    verifier.prepare()
    return verifier


def receive(stream: IO[bytes]) -> bytes | None:
    """The next frame's body; None at the end of the pipe."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def send(stream: IO[bytes], value: Any) -> None:
    """Write one frame of JSON."""
    body = json.dumps(value, default=float).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies."""
    if sys.platform == "linux":  # elsewhere only the closed pipe ends it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    main()
