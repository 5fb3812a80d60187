"""A worker process: verifies one job at a time for the pool, with a verifier that was loaded before it was forked.

Invariants: its socket is private (what a verifier prints goes to stderr); it spends no more address space than
`memory_mb` beyond what it was forked with; it judges no answer when it is nearly full and was not at first; it never
writes anything but one frame per job.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import pickle
import resource
import socket
from collections.abc import Callable
from typing import Any

from rlvr.core.process.framing import receive, send
from rlvr.errors import user_traceback
from rlvr.records import Verdict
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.pool.usage import Usage
from rlvr.verifiers.pool.wire import VerifierJob, exhausted_to_json, verdicts_to_json

SPENT = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT}
"""Errors of a process that has no memory, descriptors, processes or disk left, which earlier answers may have spent."""
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
"""Words of a RuntimeError for want of memory: those of torch's allocator of the CPU (c10/core/impl/alloc_cpu.cpp) and
of C++."""


class Exhausted(BaseException):
    """A resource of this process is used up; `memory`: its memory. No Exception, so that a verification does not take
    it for an error of its own."""

    def __init__(self, what: str, memory: bool) -> None:
        super().__init__(what)
        self.memory = memory


def work(sock: socket.socket, verifier: Verifier, memory_mb: int) -> None:
    """Serve jobs until the socket closes."""
    usage = Usage(memory_mb)
    # A crashed verifier must not write gigabytes of core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with asyncio.Runner() as runner:
        while (body := receive(sock)) is not None:
            send(sock, answer(body, verifier, runner, usage))
            usage.served()


def answer(body: bytes, verifier: Verifier, runner: asyncio.Runner, usage: Usage) -> bytes:
    """The reply to one job."""
    # Before the job is even read: the answer goes to a fresh worker instead.
    if usage.full:
        return exhausted_to_json(str(usage), memory=False)
    try:
        job: VerifierJob = pickle.loads(body)
    except MemoryError:
        return exhausted_to_json("MemoryError", memory=True)
    except BaseException as error:
        return _failed(error, 1)
    try:
        reply, paid = runner.run(_reply(job, verifier))
    except (Exhausted, MemoryError) as error:
        memory = error.memory if isinstance(error, Exhausted) else True
        return exhausted_to_json(str(error) or "MemoryError", memory, user_traceback(error.__cause__ or error))
    usage.measure()
    # A score above 0 is kept: want of memory makes checks fail, not pass.
    if usage.full and not paid:  # it may have hidden that it ran out
        return exhausted_to_json(str(usage), memory=False)
    return reply


async def _reply(job: VerifierJob, verifier: Verifier) -> tuple[bytes, bool]:
    """The reply to a job, and True if all its scores are above 0."""
    try:
        verdicts = await job.verdicts(verifier, bounded)
        return verdicts_to_json(verdicts), all(verdict.score is not None and verdict.score > 0 for verdict in verdicts)
    except (Exhausted, MemoryError):
        raise
    except BaseException as error:  # a verdict that is no JSON, KeyboardInterrupt raised by a verifier ...
        return _failed(error, len(job.completions)), False


def _failed(error: BaseException, count: int) -> bytes:
    return verdicts_to_json([Verdict.raised("it raised", error)] * count)


async def bounded(verify: Callable[[], Any]) -> Any:
    """Return the result of `verify`. Exhausted if it fails for want of a resource: whether this answer used it up, or
    answers before it did, shows in a fresh process."""
    try:
        result = verify()
        if inspect.isawaitable(result):
            return await result
        return result
    except Exception as error:
        spent = [one for one in _causes(error) if _out_of_memory(one) or _for_want_of_a_resource(one)]
        if not spent:
            raise
        memory = any(_out_of_memory(one) for one in spent)
        raise Exhausted(f"{type(spent[0]).__name__}: {spent[0]}".rstrip(": "), memory) from error


def _causes(error: BaseException) -> list[BaseException]:
    """An exception and all that led to it: libraries wrap what the system says in errors of their own."""
    causes: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        # Causes may form a cycle.
        if one is None or any(one is cause for cause in causes):
            continue
        causes.append(one)
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
    return causes


def _out_of_memory(error: BaseException) -> bool:
    texts = isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    return texts or isinstance(error, MemoryError)


def _for_want_of_a_resource(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in SPENT
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)
