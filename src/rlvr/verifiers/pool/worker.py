"""A worker process: verifies one job at a time for the pool, with a verifier that was loaded before it was forked.

Invariants: its socket is private (what a verifier prints goes to stderr); it spends no more address space than `memory_mb`
beyond what it was forked with; it never writes anything but one frame per job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlvr.records import Verdict, VerdictStatus
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.pool.wire import Job, Several, receive, send, verdicts_to_json


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
    except BaseException as error:
        return _failed(error, 1)
    parts = runner.run(_replies([job] if isinstance(job, Job) else job.jobs, verifier))
    return parts[0] if isinstance(job, Job) else b"[" + b", ".join(part[1:-1] for part in parts) + b"]"


async def _replies(jobs: Sequence[Job], verifier: Verifier) -> list[bytes]:
    """The reply to each job, one after the other in one turn of the loop, since a turn costs more than a quick verdict."""
    return [await _reply(job, verifier) for job in jobs]


async def _reply(job: Job, verifier: Verifier) -> bytes:
    try:
        return verdicts_to_json(await job.verdicts(verifier, bounded))
    except BaseException as error:  # a verdict that is no JSON, KeyboardInterrupt raised by a verifier ...
        return _failed(error, len(job.completions))


def _failed(error: BaseException, count: int) -> bytes:
    return verdicts_to_json([Verdict.raised("it raised", error)] * count)


async def bounded(verify: Callable[[], Any]) -> Any:
    """What `verify` returns; memory that the answer spent is the answer's fault, so it scores 0."""
    try:
        return verify()
    except MemoryError:
        return Verdict(VerdictStatus.ERROR, 0.0, reason="the answer needs more memory than a worker has")


def _limit_memory(more: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # no /proc; a lower limit is set already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
