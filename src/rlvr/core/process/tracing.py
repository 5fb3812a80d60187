"""Explanations of a hang, a crash or an error of another process: the stacks of its threads, and tracebacks.

A process that runs our Python calls `write_stacks` when it begins. From then on faulthandler writes the stacks of all
its threads when it crashes (SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL) and when `request_stacks` asks for them, before a
kill for a missed deadline, say. C code writes them, so they come while the interpreter computes or waits for its lock,
too. They go to standard error, where that is a log whose end an error's text shows, or into a `StackPipe`.

An exception goes to another process as a `RemoteFailure`, with the text of its traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Not SIGUSR1: that one asks a run for its status, and a run of a sweep is a started process, too.
SIGNAL = signal.SIGUSR2
"""The signal that asks a process for its stacks."""
STDERR = 2
# Arbitrary: a moment to write in, on a busy machine. A stopped process writes nothing in any time.
WRITE_SECONDS = 0.5
"""Seconds after which stacks that were asked for are not waited for any more."""
QUIET_SECONDS = 0.02
"""Seconds without a new byte after which they are whole: faulthandler writes them in one go."""
# Arbitrary: some hundred frames. The last lines of a traceback name the exception and the place.
MOST = 20_000
"""Characters that are kept of a traceback, its last ones, and of the stacks in a pipe."""


def write_stacks(output: int = STDERR) -> None:
    """Write the stacks of this process's threads to the descriptor `output` when it crashes and when it is asked."""
    faulthandler.enable(output, all_threads=True)
    faulthandler.register(SIGNAL, output, all_threads=True, chain=False)


def request_stacks(processes: Iterable[int]) -> bool:
    """Ask processes for their stacks, by number; True if one of them writes some. Returns before they are written."""
    asked = False
    for process in processes:
        # The signal ends a process that has no handler for it.
        if _catches(process):
            with contextlib.suppress(OSError):
                os.kill(process, SIGNAL)
                asked = True
    return asked


def _catches(process: int) -> bool:
    """Return True if a process has a handler for `SIGNAL`."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        # proc(5): a mask of the signals that are caught, in hexadecimal, with bit 0 for signal 1.
        mask = int(status.split("SigCgt:")[1].split()[0], 16)
    except (OSError, IndexError, ValueError):
        return False
    return bool(mask >> (SIGNAL - 1) & 1)


class StackPipe:
    """A pipe into which one process writes its stacks, read by another; what does not fit into it (64 kB) is lost.

    The writer is not trusted: a pipe holds no more than the kernel lets it, and nothing here waits for its end.
    """

    def __init__(self) -> None:
        # Not blocking: a process that fills the pipe goes on, and one that writes nothing is not waited for.
        self._read, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """`writer`: the end for `write_stacks` in the other process; closed here by whoever has passed it on."""
        self._text = b""

    def text(self) -> str:
        """The text that was written until now."""
        with contextlib.suppress(OSError):  # empty, or closed
            while part := os.read(self._read, 2**16):
                self._text = (self._text + part)[:MOST]
        return self._text.decode(errors="replace").strip()

    async def written(self) -> str:
        """The stacks that were just asked for, once they are whole; "" of a process that writes none."""
        # Turns of the loop and not its clock: a loop that was held up has not read what came meanwhile.
        for _ in range(round(WRITE_SECONDS / QUIET_SECONDS)):
            before = self.text()
            await asyncio.sleep(QUIET_SECONDS)
            if before and self.text() == before:
                break
        return self.text()

    def close(self) -> None:
        """Read what is there, and close this end. Closing twice is fine."""
        if self._read >= 0:
            self.text()
            os.close(self._read)
            self._read = -1


@dataclass(frozen=True)
class RemoteFailure:
    """An exception in the form in which it goes to another process, which may not be able to import its class."""

    problem: str
    """Its class and its text."""
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """An exception that was caught in this process."""
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(f"{type(error).__name__}: {error}", text[-MOST:])

    def told(self, where: str) -> str:
        """The problem, and the traceback as that of the process `where`, for the text of an error."""
        return f"{self.problem}; in {where}:\n{self.traceback}"
