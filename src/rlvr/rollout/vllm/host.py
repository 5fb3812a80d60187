"""The trainer's end of the pipe to a process that owns an engine: starts it, sends requests, notices its death.

A thread reads the pipe and settles futures, so requests may come from any event loop, a notebook's too, and calls from
any thread. Another one writes, so that deadlines pass though the process reads nothing. Invariant: when the process
dies, everything that waits for it learns so at once, with the last lines of its log.
"""

from __future__ import annotations

import contextlib
import socket
import time
import weakref
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlvr.core.process import child_process
from rlvr.core.process.channel import Channel
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
        self._dead: str | None = None
        # A socket pair and not a named socket: no other process of the user can open it.
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = child_process.start(
                MODULE, [str(theirs.fileno())], environment, folder, self.log, pass_fds=[theirs.fileno()]
            )
        # Also for an engine that is dropped without `close`, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, child_process.kill, self.process)
        # The threads hold the host only while they have a message for it, so that a forgotten one is collected.
        host = weakref.ref(self)
        connection = Connection(ours.detach())
        self._channel = Channel(connection, "rlvr-vllm", partial(_receive, host), partial(_end, host))
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
        deadline = time.monotonic() + timeout
        future = self._replies.submit(lambda number: self._send(kind, number, *content))
        try:
            finished(future, what, deadline)
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
        self._channel.close()
        self._finalizer()

    def _send(self, *message: Any) -> None:
        if self._dead is not None:
            raise TrainingError(self._death())
        self._channel.send(message)

    def _death(self) -> str:
        log = child_process.tail(self.log, child_process.STACK_LINES)
        return f"the vLLM engine's process is gone ({self._dead}); its log ends with:\n{log}"

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

    def _ended(self, cause: BaseException | None) -> None:
        """The pipe is closed; on the reading thread."""
        if cause is not None:
            # It lives, and its answers are lost.
            self._dead = self._dead or f"a message of it could not be read: {type(cause).__name__}: {cause}"
        with contextlib.suppress(Exception):
            # The pipe closes a moment before the process ends; the exit code is part of the message.
            self.process.wait(5)
        self._dead = self._dead or f"exit code {self.process.poll()}"
        # The text once: with hundreds of requests, the log would be read hundreds of times.
        self._replies.fail(TrainingError, self._death())


def _reply(answer: Answer | RemoteFailure) -> Answer | TrainingError:
    """The answer to a request, or the error of one that vLLM refused."""
    if isinstance(answer, Answer):
        return answer
    return TrainingError(f"vLLM refused a request: {answer.told(PLACE)}")


def _receive(host: weakref.ref[EngineHost], message: tuple[Any, ...]) -> None:
    # Without a host the process is being killed, and the pipe about to end.
    if (target := host()) is not None:
        target._take(*message)


def _end(host: weakref.ref[EngineHost], cause: BaseException | None) -> None:
    if (target := host()) is not None:
        target._ended(cause)
