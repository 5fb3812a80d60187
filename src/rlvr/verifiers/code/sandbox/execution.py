"""One execution on a zygote: the messages to its processes, and the outcome made of their claims."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlvr.verifiers.code import values
from rlvr.verifiers.code.runner import DECODED_SIZE, Ended, Limits, Outcome
from rlvr.verifiers.code.sandbox.inside.program import CALL, LOADED, RAISED, VALUE
from rlvr.verifiers.code.sandbox.inside.supervisor import STARTED
from rlvr.verifiers.code.sandbox.zygote_process import SandboxError, Zygote
from rlvr.verifiers.pool.deadline import Deadline

# Arbitrary and long: a busy machine schedules the supervisor late. It is waited for only where a supervisor hangs.
GRACE_SECONDS = 20.0
"""Beyond a program's own limit, before its supervisor is given up."""
# Bytes of the head of an outcome, of which its reason, escaped as JSON, has at most 6,000.
_HEAD = 2**16
_REPORT = values.MAX_SIZE + 1
_LATE_SECONDS = 2.0
"""How long the end of a private channel may lag behind the end of its process, and a zygote's socket behind its
death."""
_WORDS_LENGTH = 1000
"""Characters that are kept of what a program says about itself: reasons are logged with every rollout."""
_ENDED = {"time": Ended.TIME, "memory": Ended.MEMORY, "output": Ended.OUTPUT}
_KILLED: dict[str, Any] = {"how": "killed", "why": "", "seconds": 0.0}
"""The end of a program whose supervisor did not live to say how, as its head would say it."""
_WORDS = {"time": "it took longer than {}", "memory": "it used more than {}", "output": "it wrote more than {}"}

Answer = Callable[[bytes], Awaitable[bytes]]
"""The report that answers the call of a candidate, both typed JSON."""


@dataclass(frozen=True)
class Program:
    """The message to the process of a program."""

    order: dict[str, Any]
    """Its kind and what that kind needs, see `inside.program`."""
    source: bytes
    limits: Limits
    stdin: bytes = b""
    call: bytes | None = None
    """`[name, args, kwargs]` as typed JSON."""
    address_space: bool = True

    @property
    def answers(self) -> bool:
        """Return whether it has done its work only when it reported a value."""
        return self.order["kind"] not in ("script", "execute")


class Execution:
    """A program on a zygote. Close it, or use it as a context; that ends its processes."""

    def __init__(self, zygote: Zygote, program: Program) -> None:
        """SandboxError when the zygote is gone."""
        self._zygote = zygote
        self._program = program
        self._job, self._channel = zygote.fork()
        self._report = b""
        self.started = False
        """Its process has been forked: from here on, the program is to blame for an end without an outcome."""

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes."""
        self._job.close()
        self._channel.close()

    async def tell(self) -> None:
        """Send the program. A process that reads no more of it has ended, and its outcome says why."""
        program = self._program
        head = {**vars(program.limits), "address_space": program.address_space}
        # The process may have ended already (a limit, a failed start).
        with contextlib.suppress(OSError):
            await self._job.send(json.dumps(head).encode() + b"\n" + program.stdin)
            await self._channel.send(json.dumps(program.order).encode(), program.source)

    async def load(self) -> bool:
        """Send a program that serves calls, and wait until it is ready for them or has ended. SandboxError as in
        `outcome`."""
        try:
            async with Deadline(self._program.limits.seconds + GRACE_SECONDS):
                await self.tell()
                with contextlib.suppress(OSError, EOFError):
                    await self._start()
                    self._report = await self._channel.receive(_REPORT)
        except TimeoutError:
            raise await self._given_up() from None
        return self._report == LOADED

    async def ask(self, call: bytes) -> bytes:
        """The report that answers a call. OSError or EOFError when the program is gone."""
        await self._channel.send(call)
        return await self._channel.receive(_REPORT)

    async def outcome(self, answer: Answer | None = None) -> Outcome:
        """Return how it ended; `answer` answers a test's calls. SandboxError when no outcome arrives."""
        # Reading the channel and the supervisor go on side by side: a program that fills the channel would block, and
        # one that ends closes it.
        exchange = asyncio.ensure_future(self._exchange(answer))
        try:
            async with Deadline(self._program.limits.seconds + GRACE_SECONDS):
                end = asyncio.ensure_future(self._end())
                try:
                    await asyncio.wait({exchange, end}, return_when=asyncio.FIRST_COMPLETED)
                    # `answer` may have raised (the candidate ended): that is the outcome of a test, and is raised here
                    # at once.
                    if exchange.done():
                        exchange.result()
                    head, out, err = await end
                finally:
                    end.cancel()
            # The process has ended, but a child of it may hold the channel open for ever: what it might say is waited
            # for briefly.
            with contextlib.suppress(TimeoutError):
                async with Deadline(_LATE_SECONDS):
                    await asyncio.wait({exchange})
            return self._as_outcome(head, out, err)
        except TimeoutError:
            raise await self._given_up() from None
        finally:
            exchange.cancel()

    async def _given_up(self) -> SandboxError:
        """The error for a supervisor that sends nothing; its zygote is closed, since nothing else ends what it
        started."""
        await self._zygote.close()
        return SandboxError("the sandbox returned no outcome of the program", self.started)

    async def _start(self) -> None:
        """Wait until the program runs. OSError or EOFError when its supervisor is gone."""
        if not self.started:
            self.started = await self._job.byte() == STARTED

    async def _exchange(self, answer: Answer | None) -> None:
        """Exchange all messages over the private channel."""
        try:
            if self._program.call is not None:
                self._report = await self._channel.receive(_REPORT)
                if self._report == LOADED:
                    await self._channel.send(self._program.call)
            # The first value or exception counts; a program cannot take it back by a second one.
            while self._report[:1] not in (VALUE, RAISED):
                self._report = await self._channel.receive(_REPORT)
                if self._report[:1] == CALL and answer is not None:
                    reply = await answer(self._report[1:])
                    await self._channel.send(reply)
                elif self._report[:1] not in (
                    VALUE,
                    RAISED,
                ):  # nobody asked for it, and as many may follow as there is time
                    return
        except (OSError, EOFError):
            return

    async def _end(self) -> tuple[dict[str, Any], bytes, bytes]:
        """The report of the supervisor: its head, and the program's output."""
        try:
            await self._start()
            body = await self._job.receive(_HEAD + 2 * self._program.limits.output_bytes)
        except (OSError, EOFError) as error:
            # A zygote whose supervisor ended with it may be found dead only a moment later. Arbitrary: some scheduler
            # turns of a busy machine.
            await asyncio.sleep(0.05)
            # The supervisor alone was killed, and only the program can have done that: it counts as the program's
            # crash.
            if self.started and self._zygote.alive:
                return _KILLED, b"", b""
            raise SandboxError(f"the sandbox ended before the program did ({error})", self.started) from error
        text, _, output = body.partition(b"\n")
        try:
            head = json.loads(text)
            cut = int(head["stdout"])
            return {name: head[name] for name in _KILLED}, output[:cut], output[cut:]
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            return _KILLED, b"", b""

    def _as_outcome(self, head: dict[str, Any], out: bytes, err: bytes) -> Outcome:
        how = head["how"]
        why = str(head["why"])[:_WORDS_LENGTH]
        seconds = head["seconds"]
        # The head is a claim like all else: `json` reads NaN and 1e999.
        if type(seconds) is not float or not math.isfinite(seconds):
            seconds = 0.0
        if how == "broken":
            raise SandboxError(why, self.started)
        made = self._program.order["kind"] == "compile"
        made = made and self._report[:1] == VALUE
        if made:
            kind, value, size, words = ("value", None, 0, "")
        else:
            kind, value, size, words = _claim(self._report)
        if isinstance(how, str) and how in _ENDED:
            return Outcome(_ENDED[how], out, err, None, _WORDS.get(how, "{}").format(why), seconds)
        # A program that sets a lower soft limit of processor time for itself gets SIGXCPU; at the sandbox's own limit
        # it gets SIGKILL, which the supervisor reports as "time".
        if how == "signal" and why == str(int(signal.SIGXCPU)):
            return Outcome(Ended.TIME, out, err, None, "it used all of its processor time", seconds)
        # Scripts need exit code 0 only, all others also a value on the channel: `os._exit(0)` in a function is no
        # answer.
        if how == "exit" and why == "0" and (kind == "value" or not self._program.answers):
            claim = self._report[1:] if kind == "value" else b""
            return Outcome(Ended.DONE, out, err, value, "", seconds, claim, size)
        if how == "exit" and kind == "raised":
            # RLIMIT_AS makes an allocation fail, which Python raises as an exception: the same limit as a kill by the
            # watch.
            if words.startswith("MemoryError"):
                ended = Ended.MEMORY
            else:
                ended = Ended.RAISED
            return Outcome(ended, out, err, None, words, seconds)
        if how == "exit":
            reason = words or (f"exit code {why}" if why != "0" else "it ended without an answer")
            return Outcome(Ended.RAISED, out, err, None, reason, seconds)
        return Outcome(Ended.CRASHED, out, err, None, _signal_name(why), seconds)


def _claim(report: bytes) -> tuple[str, Any, int, str]:
    """The kind of a report (`value`, `raised` or nothing), its value where it is small, the value's size, and its
    words."""
    kind = report[:1]
    body = report[1:]
    if kind not in (VALUE, RAISED):
        return "", None, 0, ""
    try:
        if kind == VALUE:
            value, size = values.measured(body, DECODED_SIZE)
            return "value", value, size, ""
        value = values.decode(body, DECODED_SIZE)
    except (ValueError, TypeError) as error:
        return "", None, 0, f"it reported nonsense: {error}"
    # What `crossing.described` writes, checked since any program can write to its channel.
    if type(value) is not list or len(value) != 4 or any(type(part) is not str for part in value):
        return "", None, 0, "it reported nonsense: an exception that is not described by four texts"
    name = value[0][:_WORDS_LENGTH]
    message = value[1][:_WORDS_LENGTH]
    return "raised", None, 0, f"{name}: {message}" if message else name


def _signal_name(number: str) -> str:
    try:
        return f"killed by {signal.Signals(int(number)).name}"
    except ValueError:
        return "its supervisor was killed"
