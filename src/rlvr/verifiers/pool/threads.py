"""Threads for code that may never return: an event loop of its own, and one-call threads that can be abandoned.

All threads are daemons: a call that hangs costs its thread, neither the pool nor the exit of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def cores() -> int:
    """The cores for this process: those it may run on, shared with the other processes of its launcher."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    # LOCAL_WORLD_SIZE is set by torchrun and accelerate: so many trainers share this machine's cores.
    return max(1, allowed // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


class LoopThread:
    """An asyncio loop that runs in a thread of its own, so that it works under any other loop and under none."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; its result as a future for any thread. RuntimeError when the loop has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise

    def stop(self, seconds: float = 5.0) -> None:
        """Cancel what runs and end the thread; a loop blocked for longer than `seconds` is left behind."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        # Bounded: a coroutine that blocks the loop (a call that hangs) would keep the program from ending.
        self._thread.join(seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                # A second for cleaning up in `finally` clauses; then the loop is closed over what is left.
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        finally:
            self.loop.close()


class Threads:
    """Calls on threads of their own, called `name`. `lost` counts the abandoned calls that have not returned."""

    def __init__(self, name: str = "verifier-call") -> None:
        self.name = name
        self.lost = 0

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function()`, computed on a new daemon thread; cancelling abandons the call.

        What is raised that is no Exception (SystemExit, KeyboardInterrupt) comes back as RuntimeError.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                self.lost -= 1
            elif error is None:
                future.set_result(result)
            else:
                # A future takes no StopIteration (asyncio refuses it), and SystemExit or KeyboardInterrupt would end
                # the loop's thread.
                passable = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if passable else RuntimeError(repr(error)))

        def work() -> None:
            result = None
            raised = None
            try:
                result = function()
            except BaseException as error:
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits
                loop.call_soon_threadsafe(finish, result, raised)

        threading.Thread(target=work, name=self.name, daemon=True).start()
        try:
            return await future
        finally:
            # Counted where the caller gives up, taken back in `finish` when the call returns after all.
            self.lost += future.cancelled()
