"""The trainer's end of the pipe to a process that owns an engine: starts it, sends requests, notices its death.

A thread reads the pipe and settles futures, so requests may come from any event loop, a notebook's too, and calls from
any thread. Invariant: when the process dies, everything that waits for it learns so at once, with the last lines of its
log.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlvr.core.process import child_process
from rlvr.core.process.pending_replies import Replies
from rlvr.core.process.tracing import RemoteFailure
from rlvr.core.waits import finished
from rlvr.errors import ConfigError, TrainingError, WaitTimeoutError
from rlvr.rollout.vllm.requests import Answer

MODULE = "rlvr.rollout.vllm.engine_process"
PLACE = "the vLLM engine's process"
"""The name of the process in messages."""


class EngineHost:
    """A started engine process. ConfigError when vLLM refuses the arguments."""

    def __init__(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str], folder: Path, start_timeout: float
    ) -> None:
        self.log = folder / "engine.log"
        self._replies = Replies[Any]()
        # Held while a message is written: two threads at once would mix the bytes of their messages.
        self._lock = threading.Lock()
        self._dead: str | None = None
        # A socket pair and not a named socket: no other process of the user can open it.
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = child_process.start(
                MODULE, [str(theirs.fileno())], environment, folder, self.log, pass_fds=[theirs.fileno()]
            )
        self._pipe = Connection(ours.detach())
        # Also for an engine that is dropped without `close`, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, child_process.kill, self.process)
        reader = threading.Thread(target=_read, args=(weakref.ref(self), self._pipe), name="rlvr-vllm", daemon=True)
        reader.start()
        try:
            self.facts = self._call("the vLLM engine to start", start_timeout, "start", dict(arguments))
        except BaseException:
            self.close()
            raise

    async def generate(self, *content: Any) -> Answer:
        """The answer to one request; its arguments are those of the message `generate`."""
        answer: Answer = await self._replies.ask(lambda number: self._send("generate", number, *content), self._abort)
        return answer

    def _abort(self, number: int) -> None:
        # The process may be gone, and then there is nothing to abort.
        with contextlib.suppress(TrainingError):
            self._send("abort", [number])

    def call(self, method: str, what: str, timeout: float, **arguments: Any) -> Any:
        """The result of a method of the engine. WaitTimeoutError, naming `what` and with the stacks of the process's
        threads, when it does not answer within `timeout` seconds."""
        return self._call(what, timeout, "call", method, arguments)

    def _call(self, what: str, timeout: float, kind: str, *content: Any) -> Any:
        future = self._replies.submit(lambda number: self._send(kind, number, *content))
        try:
            finished(future, what, time.monotonic() + timeout)
        except WaitTimeoutError as error:
            text = child_process.explain(self.process, self.log)
            raise WaitTimeoutError(f"{error}; the log of {PLACE} ends with:\n{text}") from error
        finally:
            # Also after Ctrl-C: nobody waits for it any more.
            future.cancel()
        return future.result()

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
        return TrainingError(f"{text}; its log ends with:\n{child_process.tail(self.log, child_process.STACK_LINES)}")

    def _take(self, kind: str, *content: Any) -> None:
        """One message of the process; on the reading thread."""
        if kind == "done":
            self._replies.settle((number, _reply(answer)) for number, answer in content[0])
            return
        number, reply = content
        if kind == "failed":
            reply = ConfigError(f"rollout.engine vllm: the engine cannot be started: {reply.told(PLACE)}")
        elif kind == "error":
            reply = TrainingError(f"the vLLM engine failed: {reply.told(PLACE)}")
        self._replies.settle([(number, reply)])

    def _ended(self) -> None:
        """The pipe is closed; on the reading thread."""
        with contextlib.suppress(Exception):
            # The pipe closes a moment before the process ends; the exit code is part of the message.
            self.process.wait(5)
        self._dead = self._dead or f"exit code {self.process.poll()}"
        self._replies.fail(self._death)


def _reply(answer: Answer | RemoteFailure) -> Answer | TrainingError:
    """The answer to a request, or the error of one that vLLM refused."""
    if isinstance(answer, Answer):
        return answer
    return TrainingError(f"vLLM refused a request: {answer.told(PLACE)}")


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
