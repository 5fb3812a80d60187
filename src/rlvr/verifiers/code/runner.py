"""The interface of runners of a model's programs: the jobs it takes and the outcomes it gives.

Invariants: an outcome holds claims of the program, never a verdict; expected outputs are in no job; whatever the
program does, the caller gets an Outcome, and only `Ended.BROKEN` (our own trouble) leaves it undecided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from rlvr.verifiers.code import values

DECODED_SIZE = 2**14
"""Bytes of a value that are decoded, compared or computed with in the trainer's process: the costliest take about 10 ms
there, during which its event loop stands still. What is larger is judged in a sandbox of its own (`judge.py`)."""


class Ended(Enum):
    """The ways in which an execution can end."""

    DONE = "done"
    """The program ended by itself: exit code 0, or a returned value."""
    RAISED = "raised"
    """An exception that nothing caught, a syntax error, or an exit code other than 0."""
    TIME = "time"
    """Killed at its wall-clock or CPU limit."""
    MEMORY = "memory"
    """It ran out of memory."""
    OUTPUT = "output"
    """It wrote more than `output_bytes`."""
    CRASHED = "crashed"
    """Ended by a signal: a crash of the interpreter, or a kill that the program brought on itself."""
    BROKEN = "broken"
    """The sandbox failed; says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """Limits of one execution."""

    # Programs of contests and functions of tests take milliseconds; tasks with a longer limit say so.
    seconds: float = 2.0
    """Wall-clock time."""
    memory_mb: int = 256
    output_bytes: int = 1 << 20
    """Bytes of standard output, and of standard error."""
    processes: int = 32
    """Processes and threads."""
    file_mb: int = 16
    """Size of the files in all writable places together."""
    cpu_seconds: float | None = None
    """Processor time of all processes together; None: a little more than `seconds`. A remote service gets `seconds`
    only."""


@dataclass(frozen=True)
class Call:
    """A call of a function that the program defines. Arguments and result travel as typed JSON (`values.py`)."""

    name: str
    """The function's name; `Solution.name` is a method of a fresh `Solution()`."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    encoded: bytes = b""
    """`[args, kwargs]` as typed JSON, in place of the two."""
    argument: int | None = None
    """The argument, by its number, that holds the result after the call, in place of what the function returns."""

    def message(self) -> bytes:
        """`[name, args, kwargs]` as typed JSON. ValueError for arguments that are not plain."""
        encoded = self.encoded or values.encode([list(self.args), self.kwargs])
        return b"[" + values.encode(self.name) + b"," + encoded[1:]


@dataclass(frozen=True)
class Job:
    """One program, once: run as a script on `stdin`, or loaded as a module and `call` made on it."""

    source: str
    language: str = "python"
    stdin: bytes = b""
    call: Call | None = None
    limits: Limits = Limits()
    packages: tuple[str, ...] = ()
    """Packages that the program may import beside the standard library; Python only."""
    sealed: bool = False
    """In Python: run no code but the source's, since its input may hold some (see `inside.sealing`)."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an execution: the way it ended, its output, its value or the reason why there is none."""

    ended: Ended
    stdout: bytes = b""
    stderr: bytes = b""
    value: Any = None
    """The value that a call returned, of exact builtin types; None where it takes more than DECODED_SIZE."""
    reason: str = ""
    """In words: the exception's type and message, the limit, the signal."""
    seconds: float = 0.0
    claim: bytes = b""
    """The value as typed JSON, as the program sent it; of a compiler, the file that it made."""
    size: int = 0
    """Bytes of the value, with the members of ranges written out."""


class Runner(Protocol):
    """Runs jobs in isolation; `tier` names the tier. Safe to use from several tasks of one event loop."""

    tier: str

    async def run(self, job: Job) -> Outcome:
        """One execution in a fresh child; never raises for what the program does."""
        ...

    async def test(self, job: Job, candidate: Job, name: str, token: str) -> Outcome:
        """Run the test code `job` in a child of its own, where `name` is a proxy of the function that `candidate`
        defines: each call of it goes through the trusted parent to a child of the candidate's own and comes back as
        typed JSON. The value is `token` when the test ran to its end."""
        ...

    async def close(self) -> None:
        """End every process."""
        ...
