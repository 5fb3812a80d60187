"""The trainer's end of one worker process: start it, give it one job, read the verdict, kill it.

Invariants: the process is started by exec, never forked from the trainer (which may hold CUDA, threads and locks), and
sees no GPU; only JSON comes back from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
import time

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.pool.wire import LENGTH, Job

START_SECONDS = 120.0
"""Wall clock for a worker to start and load a verifier: our time, not the answer's."""
MAX_REPLY = 64 * 2**20

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Thread pools reserve address space per core, which the memory limit would count."""


class WorkerError(Exception):
    """The process ended, or spoke nonsense, without a kill of ours."""


class WorkerProcess:
    """One worker process, for one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, memory_mb: int) -> WorkerProcess:
        """Start a process; its imports go on while the first job is already in its pipe."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "rlvr.verifiers.pool.worker", str(memory_mb), str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **ONE_THREAD, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is the trainer's to handle
            )
        )

    async def run(self, job: bytes, time_limit: float) -> Verdict:
        """The verdict on one job; past `time_limit` seconds its status is `timeout` and its score 0.

        WorkerError when the process is gone or talks nonsense. After that, and after a timeout, it must be killed.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._send(job)
                await self._receive()
        except TimeoutError:
            raise WorkerError(f"it was not ready after {START_SECONDS:g} s") from None
        start = time.perf_counter()
        try:
            async with asyncio.timeout(time_limit):
                verdict = Verdict.from_json(await self._receive())
        except TimeoutError:
            spent, reason = time.perf_counter() - start, f"the answer took more than {time_limit:g} s"
            return Verdict(VerdictStatus.TIMEOUT, 0.0, reason=reason, seconds=spent)
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerError(f"its reply is no verdict: {error}") from error
        return verdict

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def kill(self) -> None:
        """End the process and what it started; never waits."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until the process is gone and reaped."""
        await self.process.wait()

    async def _send(self, body: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(LENGTH.pack(len(body)) + body)
            await self.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerError("its pipe is closed") from error

    async def _receive(self) -> dict[str, object]:
        assert self.process.stdout is not None
        try:
            (length,) = LENGTH.unpack(await self.process.stdout.readexactly(LENGTH.size))
            if length > MAX_REPLY:
                raise WorkerError(f"it announced a reply of {length} bytes")
            return json.loads(await self.process.stdout.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise WorkerError(f"it ended with code {await self.process.wait()}") from error


def job_for(verifier: Verifier, task: Task, completion: str) -> bytes | None:
    """The job as a worker reads it; None when the verifier cannot be loaded elsewhere. Raises when the task cannot."""
    try:
        pickled = pickle.dumps(verifier)
    except Exception:  # pickling runs the verifier's own code
        return None
    if b"__main__" in pickled:
        return None
    names = [name for name in list(sys.modules) if name.encode() in pickled] if b"rlvr_file_" in pickled else []
    files = tuple((name, str(sys.modules[name].__file__)) for name in names if name.startswith("rlvr_file_"))
    return pickle.dumps(Job(pickled, files, task, completion))
