"""The sandboxes of this process: opened when first needed, shared by all code verifiers, closed at exit.

They live on an event loop in a thread of their own, so that they can be used from any loop (a pool's, a notebook's) and
from none.

Invariant: a fork of the program opens its own, and closes nothing of its parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rlvr.verifiers.code.runner import Job, Outcome, Runner
from rlvr.verifiers.pool.threads import LoopThread

T = TypeVar("T")

# Twice what a zygote gets to end (5 s), since several end one after the other.
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class SandboxRequest:
    """The request for a sandbox; verifiers that ask alike share one."""

    tier: str = "auto"
    unsafe: bool = False
    workers: int | None = None

    def open(self) -> Runner:
        """The runner. ConfigError where there can be none of this kind."""
        from rlvr.verifiers.code.sandbox import open_runner

        return open_runner(tier=self.tier, unsafe=self.unsafe, workers=self.workers)


class SharedRunner:
    """A runner on a loop of its own; safe to use from several loops."""

    def __init__(self, runner: Runner) -> None:
        self._thread = LoopThread("code-runner")
        self._runner = runner
        self.tier = self._runner.tier

    async def run(self, job: Job) -> Outcome:
        """See Runner."""
        return await self._elsewhere(self._runner.run(job))

    async def test(self, job: Job, candidate: Job, name: str, token: str) -> Outcome:
        """See Runner."""
        return await self._elsewhere(self._runner.test(job, candidate, name, token))

    def wait_for(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result of `work`, which uses this runner, for code without a loop. TimeoutError. Not for the runner's
        loop."""
        return self._thread.submit(work).result(seconds)

    async def close(self) -> None:
        """End every process; also done at exit."""
        await self._elsewhere(self._runner.close())

    def stop(self) -> None:
        """End every process and the loop."""
        try:
            self._thread.submit(self._runner.close()).result(CLOSE_SECONDS)
        finally:
            self._thread.stop()

    async def _elsewhere(self, work: Coroutine[Any, Any, T]) -> T:
        # Waiting here for a future of the same loop would never end.
        if asyncio.get_running_loop() is self._thread.loop:
            return await work
        return await asyncio.wrap_future(self._thread.submit(work))


_lock = threading.Lock()
_open: dict[tuple[int, SandboxRequest], SharedRunner] = {}


def shared_runner(wanted: SandboxRequest) -> SharedRunner:
    """The runner of that kind, opened if need be. ConfigError where there can be none."""
    # By process: after a fork the parent's sockets and threads are not ours.
    key = os.getpid(), wanted
    # Several verifiers may ask at once from threads: without the lock each would open a sandbox of its own, and its
    # self-test.
    with _lock:
        if key not in _open:
            _open[key] = SharedRunner(wanted.open())
        return _open[key]


def missing_here(language: str, packages: Sequence[str], wanted: SandboxRequest) -> str | None:
    """Return the reason why programs in a language and with packages cannot be run here, or None. A remote service is
    not checked."""
    from rlvr.verifiers.code.packages import paths_of
    from rlvr.verifiers.code.sandbox import languages

    available = languages()
    if wanted.tier.startswith("http"):
        return None
    for package in packages:
        if not paths_of(package):
            return f"its programs need the package {package}, which is not installed here: pip install {package}"
    if language in available:
        return None
    return f"programs in {language} cannot be run here, where there are {', '.join(available)}: install its compiler"


@atexit.register
def close_all() -> None:
    """Close what this process opened."""
    # Taken out under the lock and stopped outside of it, since stopping waits for seconds.
    with _lock:
        mine = [key for key in _open if key[0] == os.getpid()]
        runners = [_open.pop(key) for key in mine]
    for runner in runners:
        runner.stop()
