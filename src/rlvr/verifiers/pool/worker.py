"""A worker process: verifies one job at a time for the pool, with a verifier that was loaded before it was forked.

Invariants: its socket is private (what a verifier prints goes to stderr); it spends no more address space than `memory_mb`
beyond what it was forked with; it never writes anything but one frame per job.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import os
import pickle
import resource
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlvr.errors import user_traceback
from rlvr.records import Verdict
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.pool.wire import Job, Several, exhausted_to_json, receive, send, verdicts_to_json

SPENT = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT}
"""Errors of a process that has no memory, descriptors, processes or disk left, which earlier answers may have spent."""


class Exhausted(BaseException):
    """A resource of this process is used up. No Exception, so that a verification does not take it for an error of its own."""


def work(sock: socket.socket, verifier: Verifier, memory_mb: int) -> None:
    """Serve jobs until the socket closes."""
    _limit_memory(memory_mb * 2**20)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with asyncio.Runner() as runner:
        while (body := receive(sock)) is not None:
            send(sock, answer(body, verifier, runner))


def answer(body: bytes, verifier: Verifier, runner: asyncio.Runner) -> bytes:
    """The reply to one job, or to several."""
    try:
        job: Job | Several = pickle.loads(body)
    except MemoryError:
        return exhausted_to_json("MemoryError", memory=True)
    except BaseException as error:
        return _failed(error, 1)
    try:
        parts = runner.run(_replies([job] if isinstance(job, Job) else job.jobs, verifier))
    except (Exhausted, MemoryError) as error:
        cause = error.__cause__ or error
        return exhausted_to_json(str(error) or "MemoryError", isinstance(cause, MemoryError), user_traceback(cause))
    return parts[0] if isinstance(job, Job) else b"[" + b", ".join(part[1:-1] for part in parts) + b"]"


async def _replies(jobs: Sequence[Job], verifier: Verifier) -> list[bytes]:
    """The reply to each job, one after the other in one turn of the loop, since a turn costs more than a quick verdict."""
    return [await _reply(job, verifier) for job in jobs]


async def _reply(job: Job, verifier: Verifier) -> bytes:
    try:
        return verdicts_to_json(await job.verdicts(verifier, bounded))
    except (Exhausted, MemoryError):
        raise
    except BaseException as error:  # a verdict that is no JSON, KeyboardInterrupt raised by a verifier ...
        return _failed(error, len(job.completions))


def _failed(error: BaseException, count: int) -> bytes:
    return verdicts_to_json([Verdict.raised("it raised", error)] * count)


async def bounded(verify: Callable[[], Any]) -> Any:
    """What `verify` returns. Exhausted where it fails for want of a resource: whether the answer took it, or answers before
    it did, shows in a fresh process."""
    try:
        result = verify()
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        if not _for_want_of_a_resource(error):
            raise
        raise Exhausted(f"{type(error).__name__}: {error}".rstrip(": ")) from error


def _for_want_of_a_resource(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in SPENT
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return no_thread or isinstance(error, MemoryError)


def _limit_memory(more: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # no /proc; a lower limit is set already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
