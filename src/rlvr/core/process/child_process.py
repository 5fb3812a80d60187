"""Processes that this one starts by exec, watches and ends: never forked, since it may hold CUDA, threads and locks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlvr.core.process import parent_death, tracing
from rlvr.core.process.deadline import Deadline

# Matches RANK, LOCAL_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, TORCHELASTIC_RUN_ID, ACCELERATE_MIXED_PRECISION; not RANKING,
# and not CUDA_VISIBLE_DEVICES, which the engine needs.
LAUNCHED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(WORLD_SIZE|RANK)$|ROLE_NAME$|MASTER_|TORCHELASTIC_|ACCELERATE_")
"""Environment variables by which a launcher makes a process a rank. Processes that a rank starts are none, and do not
inherit them."""
RUN = """
import sys
from rlvr.core.process import parent_death
parent_death.die_with_parent()
from rlvr.core.process import tracing
tracing.write_stacks()
import runpy
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Program that runs a module: first `die_with_parent` and `write_stacks`, then the imports, which take time."""
TRACKER_SECONDS = 5.0
"""Seconds for a group's resource tracker to clean up after the others; it takes some milliseconds."""

# Arbitrary: killed processes end within milliseconds, but for those in an uninterruptible wait for a device.
MARKED_SECONDS = 5.0
"""Seconds within which marked processes are looked for and killed."""
# Arbitrary: the stack of a main thread below vLLM has some 30 frames.
STACK_LINES = 60
"""Lines of a log that may end with stacks."""
# Arbitrary: 60 lines of a thousand characters.
TAIL_BYTES = 2**16
"""Bytes at the end of a log among which its last lines are looked for."""


def spawn(
    command: Sequence[str], environment: Mapping[str, str], output: int | IO[bytes] | None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command, with an environment of its own; what it prints goes to `output`, with None where ours goes."""
    return subprocess.Popen(
        command,
        env=environment,
        # Else it would read what is typed for us.
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # A group of its own, which can be killed as a whole, and which a Ctrl-C in our terminal does not reach.
        start_new_session=True,
        **options,
    )


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    scratch: Path | None = None,
    log: Path | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Run a module in a process of its own group that lives at most as long as this one. It removes the folder
    `scratch` if this process ends first; what it prints goes to `log`, without one where ours goes."""
    own = {parent_death.OWNER: str(os.getpid()), parent_death.SCRATCH: str(scratch or "")}
    inherited = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    command = [sys.executable, "-c", RUN, module, *arguments]
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        return spawn(command, {**inherited, **environment, **own}, output, **options)


async def stop(process: subprocess.Popen[bytes], seconds: float = 5.0) -> None:
    """Wait for the end of a process that ends when its socket closes, which the caller has done. When it takes longer
    than `seconds`, it writes the stacks of its threads, if it runs our Python, and is killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)  # a stopped process would not see that its socket is closed
    try:
        async with Deadline(seconds):
            await _ended(process)
    except TimeoutError:
        if tracing.request_stacks([process.pid]):
            await asyncio.sleep(tracing.WRITE_SECONDS)
        process.kill()
        await _ended(process)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    # Polled, since `Popen.wait` would block the loop.
    while process.poll() is None:
        await asyncio.sleep(0.002)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started here, and its group."""
    # The number of a process that was waited for may be that of another one now, whose group is not ours. While members
    # of the old group live, the kernel gives the number to nobody.
    if process.returncode is not None and Path(f"/proc/{process.pid}").exists():
        return
    # All but the trackers first: a tracker unlinks what the others leave once the last of them is gone.
    parent_death.kill_all(parent_death.members(process.pid))
    deadline = time.monotonic() + TRACKER_SECONDS
    while time.monotonic() < deadline and any(map(parent_death.is_tracker, parent_death.members(process.pid))):
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        # The trackers that hang, and what was forked in the meantime.
        os.killpg(process.pid, signal.SIGKILL)
    # Else it stays a zombie until this process ends.
    process.wait()


def kill_marked(name: str, value: str) -> None:
    """Kill every process with this environment variable, and so what a started process has left behind when it was
    killed before it could end its children, in whatever group they are. A process that was started with an environment
    of its own, without the variable, is not found."""
    variable = f"{name}={value}".encode()
    deadline = time.monotonic() + MARKED_SECONDS
    # Until none is found: one that forks meanwhile may be missed. A killed process has no environment any more.
    while time.monotonic() < deadline:
        killed = [process for process in _processes() if _kill_if(variable, process)]
        if not killed:
            return
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _kill_if(variable: bytes, process: int) -> bool:
    """Kill a process if it has the variable in its environment; True if it had."""
    try:
        # Before its environment is read: the number may be that of another process afterwards.
        pidfd = os.pidfd_open(process)
    except OSError:
        return False
    try:
        # That of its last exec, which forks share; readable for processes of this user only.
        if variable not in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def explain(process: subprocess.Popen[bytes], log: Path) -> str:
    """The end of the log of a module that was started here, for the text of an error about its hang or its death. While
    it runs, the stacks of the threads of its group are added to the log before, those of main threads last."""
    before = _size(log)
    if process.poll() is None and tracing.request_stacks(parent_death.members(process.pid)):
        until = time.monotonic() + tracing.WRITE_SECONDS
        last = before
        while time.monotonic() < until:
            time.sleep(tracing.QUIET_SECONDS)
            if before != last == _size(log):
                break
            last = _size(log)
    return tail(log, STACK_LINES)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, for an error's text."""
    try:
        with log.open("rb") as file:
            # Only the end is read: the log of a long run has many megabytes.
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            end = file.read(TAIL_BYTES)
    except OSError:
        return ""
    return "\n".join(end.decode(errors="replace").splitlines()[-lines:])
