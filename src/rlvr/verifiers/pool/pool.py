"""Where verifiers run: in the caller (quick), in worker processes, on threads, or on an event loop.

    with VerifierPool(workers=4) as pool:
        verdict = await pool.verify(verifier, task, completion)

Invariants: every call of `verify` ends in one Verdict, within the time limit plus the wait for a free slot, and never in
an exception; the clock of an answer starts when its verification starts, not while it waits; no process outlives the
pool or the program.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any

from rlvr.records import Rollout, Task, Verdict, VerdictStatus
from rlvr.verifiers.base import FunctionVerifier, Verifier, judged
from rlvr.verifiers.pool.process import WorkerError, WorkerProcess, job_for
from rlvr.verifiers.pool.threads import LoopThread, Threads

MAX_THREADS = 32
MAX_ASYNC = 64
MAX_LOST = 256
"""Abandoned calls that never returned, beyond which no new thread is started."""


class VerifierPool:
    """Runs verifiers of any kind; safe to await from any event loop, several at once.

    `workers` processes (default: one per core, 16 at most) are started when first needed, and take `memory_mb` of address
    space each. `time_limit` (seconds) replaces the verifiers' own.

    What happens past the time limit: a verifier that `needs.process` is killed, and the answer scores 0; any other one is
    abandoned, and the verdict is undecided, since nobody knows whose fault it was.
    """

    def __init__(self, workers: int | None = None, time_limit: float | None = None, memory_mb: int = 2048) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"a pool needs at least 1 worker, not {workers}")
        if time_limit is not None and time_limit <= 0:
            raise ValueError(f"the time limit must be above 0 seconds, not {time_limit}")
        self.workers = workers or min(os.cpu_count() or 1, 16)
        self.time_limit, self.memory_mb = time_limit, memory_mb
        self._closed = False
        self._idle: list[WorkerProcess] = []
        self._processes: list[WorkerProcess] = []
        self._threads = Threads()
        self._process_slots = asyncio.Semaphore(self.workers)
        self._thread_slots = asyncio.Semaphore(MAX_THREADS)
        self._async_slots = asyncio.Semaphore(MAX_ASYNC)
        self._loop = LoopThread("verifier-pool")
        atexit.register(self.close)
        self._guests = LoopThread("verifier-async")  # apart, so that a guest that blocks its loop stops no deadline

    async def verify(self, verifier: Verifier, task: Task, completion: str, rollout: Rollout | None = None) -> Verdict:
        """The verdict of `verifier` on one completion. `rollout` is for functions that ask for token ids."""
        verdict = self._quick(verifier, task, completion)
        if verdict is not None:
            return verdict
        try:
            work = self._loop.submit(self._verify(verifier, task, completion, rollout))
        except RuntimeError:  # closed since we looked
            return _closed()
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and not (caller and caller.cancelling()):
                return _closed()
            raise

    def verify_many(self, verifier: Verifier, pairs: Iterable[tuple[Task, str]]) -> list[Verdict]:
        """The verdicts on (task, completion) pairs, in order; for code without an event loop of its own."""

        async def gather() -> list[Verdict]:
            return await asyncio.gather(*(self.verify(verifier, task, completion) for task, completion in pairs))

        return self._loop.submit(gather()).result() if not self._closed else [_closed() for _ in pairs]

    def close(self) -> None:
        """End all processes and threads; verifications under way end undecided. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._loop.submit(self._end_processes()).result()
        self._guests.stop()
        self._loop.stop()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _quick(self, verifier: Verifier, task: Task, completion: str) -> Verdict | None:
        if self._closed:
            return _closed()
        start = time.perf_counter()
        try:
            verdict = verifier.quick(task, completion)
            return verdict and replace(verdict, seconds=time.perf_counter() - start)
        except Exception as error:  # a verifier's trouble costs a verdict, not the run
            return Verdict.undecided(f"{type(verifier).__name__}.quick raised {type(error).__name__}: {error}")

    async def _verify(self, verifier: Verifier, task: Task, completion: str, rollout: Rollout | None) -> Verdict:
        limit = verifier.time_limit if self.time_limit is None else self.time_limit
        try:
            if verifier.needs.process:
                job = job_for(verifier, task, completion)
                if job is not None:
                    return await self._in_process(job, limit)
                _warn_unsendable(type(verifier).__name__)
            return await (self._async if _is_async(verifier) else self._in_thread)(
                verifier, task, completion, rollout, limit
            )
        except Exception as error:  # whatever we did not think of costs this verdict only
            return Verdict.undecided(f"the verification failed: {type(error).__name__}: {error}")

    async def _async(
        self, verifier: Verifier, task: Task, completion: str, rollout: Rollout | None, limit: float
    ) -> Verdict:
        async with self._async_slots:
            guest = self._guests.submit(judged(verifier, task, completion, rollout))
            return await self._within(asyncio.wrap_future(guest), limit)

    async def _in_thread(
        self, verifier: Verifier, task: Task, completion: str, rollout: Rollout | None, limit: float
    ) -> Verdict:
        async with self._thread_slots:
            if self._threads.lost >= MAX_LOST:
                return Verdict.undecided(f"{self._threads.lost} earlier calls of verifiers never returned")
            return await self._within(judged(verifier, task, completion, rollout, self._threads.call), limit)

    async def _within(self, work: Any, limit: float) -> Verdict:
        """The verdict of `work`, or an undecided one past the limit, without waiting for it to give up."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=limit)
        finally:
            finished = task.done()
            task.cancel()
        if not finished:
            return Verdict.undecided(f"no verdict after {limit:g} s", VerdictStatus.TIMEOUT, seconds=limit)
        try:
            return task.result()
        except asyncio.CancelledError:
            return Verdict.undecided("the verifier cancelled itself")

    async def _in_process(self, job: bytes, limit: float) -> Verdict:
        async with self._process_slots:
            for _ in range(2):  # a worker that something else killed is worth a second try
                if self._closed:
                    break
                try:
                    return await self._on_worker(job, limit)
                except WorkerError as error:
                    reason = f"the worker process died twice: {error}"
            return _closed() if self._closed else Verdict.undecided(reason)

    async def _on_worker(self, job: bytes, limit: float) -> Verdict:
        worker = await self._take_worker()
        keep = False
        try:
            verdict = await worker.run(job, limit)
            keep = verdict.status is not VerdictStatus.TIMEOUT
            return verdict
        finally:
            if keep:
                self._idle.append(worker)
            else:
                worker.kill()

    async def _take_worker(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
        worker = await WorkerProcess.start(self.memory_mb)
        self._processes = [w for w in self._processes if w.alive] + [worker]
        return worker

    async def _end_processes(self) -> None:
        alive = [worker for worker in self._processes if worker.alive]
        for worker in alive:
            worker.kill()
        await asyncio.gather(*(worker.wait() for worker in alive))


def _is_async(verifier: Verifier) -> bool:
    function: Callable[..., Any] = verifier.call.function if isinstance(verifier, FunctionVerifier) else verifier.verify
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _warn_unsendable(name: str) -> None:
    warnings.warn(
        f"{name} asks for a worker process but cannot be sent to one (it is defined in a notebook or in __main__, or cannot "
        "be pickled); it runs on a thread, where it cannot be killed. Move it to a module or a file.",
        stacklevel=2,
    )


def _closed() -> Verdict:
    return Verdict.undecided("the verifier pool is closed")
