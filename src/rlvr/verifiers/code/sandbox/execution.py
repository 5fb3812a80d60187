"""One execution of a program in processes forked by a zygote: sends the job, receives the reports, makes the outcome.

Two processes take part, each on a socket of its own: the supervisor (the job socket) says how the program ended and
what it printed; the program (the channel) reports values, exceptions and calls. Both may be forged by the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlvr.core.process.deadline import Deadline
from rlvr.verifiers.code import values
from rlvr.verifiers.code.runner import DECODED_SIZE, Ended, Limits, Outcome
from rlvr.verifiers.code.sandbox.inside.program import CALL, LOADED, RAISED, VALUE
from rlvr.verifiers.code.sandbox.inside.supervisor import STARTED
from rlvr.verifiers.code.sandbox.zygote_process import SandboxError, Zygote

# Arbitrary and long, since a busy machine may schedule the supervisor late. It passes only if a supervisor hangs.
GRACE_SECONDS = 20.0
"""Seconds beyond the program's time limit, after which the supervisor is given up."""
_HEAD_SIZE = 2**16
"""Largest head of a supervisor's message in bytes: its reason has at most 12,000, 1000 characters escaped as JSON."""
_REPORT_SIZE = values.MAX_SIZE + 1
"""Largest report of a program: one letter and a value."""
_LATE_SECONDS = 2.0
"""Seconds that reports are still awaited after the program has ended."""
_REASON_LENGTH = 1000
"""Characters that are kept of a text from the program: reasons are logged with every rollout."""
_ENDED = {"time": Ended.TIME, "memory": Ended.MEMORY, "output": Ended.OUTPUT}
_KILLED: dict[str, Any] = {"how": "killed", "why": "", "seconds": 0.0}
"""The head used in place of one that did not arrive or cannot be read."""
_LIMIT_REASONS = {"time": "it took longer than {}", "memory": "it used more than {}", "output": "it wrote more than {}"}

Answer = Callable[[bytes], Awaitable[bytes]]
"""Takes a test's call of its candidate, as typed JSON, and returns the report of the candidate that answers it."""


@dataclass(frozen=True)
class Program:
    """A job in the form in which it is sent to the supervisor and to the program's process."""

    order: dict[str, Any]
    """The kind of the job and the parameters of that kind, which `inside.program` reads."""
    source: bytes
    limits: Limits
    stdin: bytes = b""
    call: bytes | None = None
    """`[name, args, kwargs]` as typed JSON."""
    address_space: bool = True
    """Limit the address space of the processes (RLIMIT_AS)."""

    @property
    def answers(self) -> bool:
        """Return True if the program must report a value: all kinds but scripts and compiled programs."""
        return self.order["kind"] not in ("script", "execute")


class Execution:
    """The processes of one program. `close`, or the end of a `with` block, ends them."""

    def __init__(self, zygote: Zygote, program: Program) -> None:
        """Fork the processes. SandboxError if the zygote has ended."""
        self._zygote = zygote
        self._program = program
        self._job, self._channel = zygote.fork()
        self._report = b""
        self.started = False
        """True once the program's process is forked. If the supervisor ends without an outcome after that, the program
        is held responsible."""

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close both sockets, which ends the processes."""
        self._job.close()
        self._channel.close()

    async def tell(self) -> None:
        """Send the limits and standard input to the supervisor, and the order and source to the program."""
        program = self._program
        head = {**vars(program.limits), "address_space": program.address_space}
        # The receiver may have ended already (a limit, a failed start): `outcome` then says why.
        with contextlib.suppress(OSError):
            await self._job.send(json.dumps(head).encode() + b"\n" + program.stdin)
            await self._channel.send(json.dumps(program.order).encode(), program.source)

    async def load(self) -> bool:
        """Send a program that serves calls and wait until it is loaded; False if it ended or reported something else.
        SandboxError as in `outcome`."""
        try:
            async with Deadline(self._program.limits.seconds + GRACE_SECONDS):
                await self.tell()
                with contextlib.suppress(OSError, EOFError):
                    await self._start()
                    self._report = await self._channel.receive(_REPORT_SIZE)
        except TimeoutError:
            raise await self._given_up() from None
        return self._report == LOADED

    async def ask(self, call: bytes) -> bytes:
        """Send a call and return the program's report. OSError or EOFError if the program has ended."""
        await self._channel.send(call)
        return await self._channel.receive(_REPORT_SIZE)

    async def outcome(self, answer: Answer | None = None) -> Outcome:
        """Wait for the end of the program and return its outcome. `answer` answers the calls of a test. SandboxError if
        the supervisor sends no outcome, or reports a failure of the sandbox."""
        # Both sockets are read concurrently: a program whose channel is not read would block, and then never end.
        exchange = asyncio.ensure_future(self._exchange(answer))
        try:
            async with Deadline(self._program.limits.seconds + GRACE_SECONDS):
                end = asyncio.ensure_future(self._end())
                try:
                    await asyncio.wait({exchange, end}, return_when=asyncio.FIRST_COMPLETED)
                    # Raises at once what `answer` raised: the candidate has ended, so the test cannot go on.
                    if exchange.done():
                        exchange.result()
                    head, out, err = await end
                finally:
                    end.cancel()
            # Reports that the program sent before its end may still be on their way. The wait is bounded, since a child
            # of the program may hold the channel open.
            with contextlib.suppress(TimeoutError):
                async with Deadline(_LATE_SECONDS):
                    await asyncio.wait({exchange})
            return self._as_outcome(head, out, err)
        except TimeoutError:
            raise await self._given_up() from None
        finally:
            exchange.cancel()

    async def _given_up(self) -> SandboxError:
        """Close the zygote, which ends the processes that a hanging supervisor left, and return the error to raise."""
        await self._zygote.close()
        return SandboxError("the sandbox returned no outcome of the program", self.started)

    async def _start(self) -> None:
        """Wait until the program's process is forked. OSError or EOFError if the supervisor has ended."""
        if not self.started:
            self.started = await self._job.take(1) == STARTED

    async def _exchange(self, answer: Answer | None) -> None:
        """Make the program's call, if it has one, and read reports until a value or an exception arrives; the calls of
        a test are answered."""
        try:
            if self._program.call is not None:
                self._report = await self._channel.receive(_REPORT_SIZE)
                if self._report == LOADED:
                    await self._channel.send(self._program.call)
            # Only the first value or exception counts: reading stops there.
            while self._report[:1] not in (VALUE, RAISED):
                self._report = await self._channel.receive(_REPORT_SIZE)
                if self._report[:1] == CALL and answer is not None:
                    reply = await answer(self._report[1:])
                    await self._channel.send(reply)
                # An unexpected report: a program could send such reports until its time is up.
                elif self._report[:1] not in (VALUE, RAISED):
                    return
        except (OSError, EOFError):
            return

    async def _end(self) -> tuple[dict[str, Any], bytes, bytes]:
        """The supervisor's message: its head, and the program's standard output and standard error."""
        try:
            await self._start()
            body = await self._job.receive(_HEAD_SIZE + 2 * self._program.limits.output_bytes)
        except (OSError, EOFError) as error:
            # If the whole zygote ended, `alive` may show it only a moment after the supervisor's socket closed. The
            # length is arbitrary.
            await asyncio.sleep(0.05)
            # Only the supervisor ended. The program must have killed it: this counts as a crash of the program.
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
        """The outcome, from the supervisor's head and output and the program's last report."""
        how = head["how"]
        why = str(head["why"])[:_REASON_LENGTH]
        seconds = head["seconds"]
        # The program may have forged the head, and `json` accepts NaN and 1e999.
        if type(seconds) is not float or not math.isfinite(seconds):
            seconds = 0.0
        if how == "broken":
            raise SandboxError(why, self.started)
        if self._program.order["kind"] == "compile" and self._report[:1] == VALUE:
            # The value of a compiler is the compiled file, not JSON.
            kind, value, size, words = "value", None, 0, ""
        else:
            kind, value, size, words = _decoded_report(self._report)
        if isinstance(how, str) and how in _ENDED:
            return Outcome(_ENDED[how], out, err, None, _LIMIT_REASONS.get(how, "{}").format(why), seconds)
        # A program that lowers its own soft limit of processor time gets SIGXCPU. At the sandbox's limit it gets
        # SIGKILL, which the supervisor reports as "time".
        if how == "signal" and why == str(int(signal.SIGXCPU)):
            return Outcome(Ended.TIME, out, err, None, "it used all of its processor time", seconds)
        # A script needs only exit code 0. Programs of other kinds must report a value, too: a function that calls
        # `os._exit(0)` gives no answer.
        if how == "exit" and why == "0" and (kind == "value" or not self._program.answers):
            claim = self._report[1:] if kind == "value" else b""
            return Outcome(Ended.DONE, out, err, value, "", seconds, claim, size)
        if how == "exit" and kind == "raised":
            # Under RLIMIT_AS an allocation fails with MemoryError. It counts as the memory limit, like a kill by the
            # supervisor.
            if words.startswith("MemoryError"):
                ended = Ended.MEMORY
            else:
                ended = Ended.RAISED
            return Outcome(ended, out, err, None, words, seconds)
        if how == "exit":
            reason = words or (f"exit code {why}" if why != "0" else "it ended without an answer")
            return Outcome(Ended.RAISED, out, err, None, reason, seconds)
        return Outcome(Ended.CRASHED, out, err, None, _signal_name(why), seconds)


def _decoded_report(report: bytes) -> tuple[str, Any, int, str]:
    """The kind of a report (`value`, `raised`, or empty if it is neither or malformed), its value if that has at most
    DECODED_SIZE bytes, the size of the value, and the exception or fault in words."""
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
    # The form that `crossing.described` writes; the program may have written any other.
    if type(value) is not list or len(value) != 4 or any(type(part) is not str for part in value):
        return "", None, 0, "it reported nonsense: an exception that is not described by four texts"
    name = value[0][:_REASON_LENGTH]
    message = value[1][:_REASON_LENGTH]
    return "raised", None, 0, f"{name}: {message}" if message else name


def _signal_name(number: str) -> str:
    """The reason of a crash; `number` is empty in `_KILLED`."""
    try:
        return f"killed by {signal.Signals(int(number)).name}"
    except ValueError:
        return "its supervisor was killed"
