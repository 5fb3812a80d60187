"""The trainer's end of the pipe to a process that owns an engine: starts it, sends requests, notices its death.

A thread reads the pipe and settles futures, so requests may come from any event loop, a notebook's too, and calls from
any thread. Invariant: when the process dies, everything that waits for it learns so at once, with the last lines of its
log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlvr.core.process import child_process
from rlvr.core.process.pending_replies import Replies
from rlvr.core.waits import finished
from rlvr.errors import ConfigError, TrainingError
from rlvr.rollout.vllm.requests import Answer

MODULE = "rlvr.rollout.vllm.engine_process"


class EngineHost:
    """A started engine process. ConfigError when vLLM refuses the arguments."""

    def __init__(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str], folder: Path, start_timeout: float
    ) -> None:
        self.log = folder / "engine.log"
        self._numbers = itertools.count()
        self._replies = Replies[Answer]()
        self._calls: dict[int, Future[Any]] = {}
        # Held while a message is written: two threads at once would mix the bytes of their messages.
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._ready: Future[dict[str, Any]] = Future()
        # A socket pair and not a named socket: no other process of the user can open it.
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = child_process.start(
                MODULE, [str(theirs.fileno())], environment, folder, self.log, pass_fds=[theirs.fileno()]
            )
        self._pipe = Connection(ours.detach())
        # Also for an engine that is dropped without `close`, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, child_process.kill, self.process)
        self._pipe.send(("start", dict(arguments)))
        reader = threading.Thread(target=_read, args=(weakref.ref(self), self._pipe), name="rlvr-vllm", daemon=True)
        reader.start()
        try:
            finished(self._ready, "the vLLM engine to start", time.monotonic() + start_timeout)
            self.facts = self._ready.result()
        except BaseException:
            self.close()
            raise

    async def generate(self, *content: Any) -> Answer:
        """The answer to one request; its arguments are those of the message `generate`."""
        return await self._replies.ask(lambda number: self._send("generate", number, *content), self._abort)

    def _abort(self, number: int) -> None:
        # The process may be gone, and then there is nothing to abort.
        with contextlib.suppress(TrainingError):
            self._send("abort", [number])

    def call(self, method: str, what: str, timeout: float, **arguments: Any) -> Any:
        """The result of a method of the engine. WaitTimeoutError, naming `what`, when it does not answer within
        `timeout` seconds."""
        number = next(self._numbers)
        future = Future[Any]()
        # Registered before sending: the result may come on the reading thread at once.
        self._calls[number] = future
        self._send("call", number, method, arguments)
        try:
            finished(future, what, time.monotonic() + timeout)
            return future.result()
        finally:
            self._calls.pop(number, None)

    def close(self) -> None:
        """End the process."""
        self._dead = self._dead or "it was closed"
        with contextlib.suppress(OSError):
            # `shutdown` and not `close`: it wakes the reading thread, which is inside `recv` and closes the pipe
            # itself.
            os.close(os.dup(self._pipe.fileno()))  # raises when it is closed already
            socket.socket(fileno=os.dup(self._pipe.fileno())).shutdown(socket.SHUT_RDWR)
        self._finalizer()

    def _send(self, *message: Any) -> None:
        if self._dead is None:
            with self._lock, contextlib.suppress(OSError):
                self._pipe.send(message)
                return
        raise self._death()

    def _death(self) -> Exception:
        code = self.process.poll()
        text = f"the vLLM engine's process is gone ({self._dead or f'exit code {code}'})"
        return TrainingError(f"{text}; its log ends with:\n{child_process.tail(self.log)}")

    def _take(self, kind: str, *content: Any) -> None:
        """One message of the process; on the reading thread."""
        if kind == "done":
            self._replies.settle((number, _reply(answer)) for number, answer in content[0])
        elif kind == "ready":
            self._ready.set_result(content[0])
        elif kind == "failed":
            self._ready.set_exception(ConfigError(f"rollout.engine vllm: the engine cannot be started: {content[0]}"))
        elif (future := self._calls.get(content[0])) is not None and kind == "result":
            future.set_result(content[1])
        elif future is not None:
            future.set_exception(TrainingError(f"the vLLM engine failed: {content[1]}"))

    def _ended(self) -> None:
        """The pipe is closed; on the reading thread."""
        with contextlib.suppress(Exception):
            # The pipe closes a moment before the process ends; the exit code is part of the message.
            self.process.wait(5)
        error = self._death()
        self._dead = self._dead or f"exit code {self.process.poll()}"
        if not self._ready.done():
            self._ready.set_exception(error)
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(error)
        self._replies.fail(self._death)


def _reply(answer: Answer | str) -> Answer | TrainingError:
    """The answer to a request, or the error of one that vLLM refused."""
    if isinstance(answer, Answer):
        return answer
    return TrainingError(f"vLLM refused a request: {answer}")


def _read(host: weakref.ref[EngineHost], pipe: Connection) -> None:
    """Until the pipe closes; holds the host only while it has a message for it, so that a forgotten one is
    collected."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = pipe.recv()
            if (target := host()) is None:
                break
            target._take(*message)
            del target
    pipe.close()
    if (target := host()) is not None:
        target._ended()
