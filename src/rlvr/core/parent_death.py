"""A process that ends when its owner does, however the owner ends.

Invariant: once `die_with_parent` has returned, neither this process nor any process of its group outlives the owner by
more than a moment, and the owner's scratch folder goes with it. The kernel reports the end of the owner (pidfd),
so nothing polls and a reused id does no harm. Imports nothing that takes time: it comes first in a started process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

OWNER = "RLVR_OWNER"
SCRATCH = "RLVR_SCRATCH"
"""Environment variables of a started process: the id of its owner, with which it ends, and the folder that it removes
if the owner ended first."""
PREFIX = "rlvr-vllm-"
"""Prefix of the names of scratch folders; no other folder is ever removed."""
# Never released: whoever takes it ends the process, and a second caller waits for that.
_leaving = threading.Lock()
# A choice. The leader needs milliseconds; a longer wait keeps processes of a leader that hangs.
GRACE = 2.0
"""Seconds that a group's leader has to end it before another member does."""
TRACKER_SECONDS = 5.0
"""Seconds for a group's resource tracker to clean up after the others; it takes some milliseconds."""
# Matches RANK, LOCAL_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, TORCHELASTIC_RUN_ID, ACCELERATE_MIXED_PRECISION; not RANKING,
# and not CUDA_VISIBLE_DEVICES, which the engine needs.
LAUNCHED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(WORLD_SIZE|RANK)$|ROLE_NAME$|MASTER_|TORCHELASTIC_|ACCELERATE_")
"""Environment variables by which a launcher makes a process a rank. Processes that a rank starts are none, and do not
inherit them."""
RUN = """
import sys
from rlvr.core import parent_death
parent_death.die_with_parent()
import runpy
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Program that runs a module: first `die_with_parent`, then the imports, which take time."""


def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], scratch: Path, log: Path, **options: Any
) -> subprocess.Popen[bytes]:
    """Run a module in a process of its own group that lives at most as long as this one; what it prints goes to
    `log`."""
    own = {OWNER: str(os.getpid()), SCRATCH: str(scratch)}
    inherited = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, module, *arguments],
            env={**inherited, **environment, **own},
            # Else it would read what is typed for us.
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A group of its own, which can be killed as a whole, and which a Ctrl-C in our terminal does not reach.
            start_new_session=True,
            **options,
        )


def end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End a process that was started here, and its group: asked first, killed after `grace` seconds."""
    with contextlib.suppress(OSError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    # Also after a clean end: the process may have left children in its group.
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started here, and its group."""
    # All but the trackers first: a tracker unlinks what the others leave once the last of them is gone.
    _kill(_members(process.pid))
    deadline = time.monotonic() + TRACKER_SECONDS
    while time.monotonic() < deadline and any(_is_tracker(member) for member in _members(process.pid)):
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        # The trackers that hang, and what was forked in the meantime.
        os.killpg(process.pid, signal.SIGKILL)
    # Else it stays a zombie until this process ends.
    process.wait()


def die_with_parent() -> None:
    """End this process's group when the owner or the parent ends; at once when they are gone. Nothing without an owner.

    The parent matters in processes that vLLM starts of its own: the engine core of a server that was killed has to go
    too.
    """
    owner = int(os.environ.get(OWNER, "0"))
    # Read before the descriptors are opened: an id that is gone is given to another process at some time.
    parent = os.getppid()
    if not owner:
        return
    poll = select.poll()
    for process in {owner, parent}:
        try:
            # A pidfd becomes readable when the process ends, and stays that of this process whoever gets its id
            # afterwards.
            poll.register(os.pidfd_open(process), select.POLLIN)
        except OSError:
            exit_now()
    # The parent ended between the two calls: the descriptor may be that of another process with its id.
    if os.getppid() != parent:
        exit_now()

    def watch() -> None:
        poll.poll()
        exit_now()

    # A daemon: a program that ends by itself does not wait for its parent's end.
    threading.Thread(target=watch, name="rlvr-parent_death", daemon=True).start()


def exit_now() -> None:
    """End the group; where the owner is gone, the leader removes its scratch folder once nobody can write to it any
    more."""
    _leaving.acquire()
    # The main thread may end when it sees that the others of the group are gone, and this thread with it, before the
    # folder is.
    atexit.register(threading.Event().wait)
    leader = os.getpgrp()
    owner = int(os.environ.get(OWNER, "0"))
    # Every process of the group sees the end at once; one of them is to kill the others and remove the folder.
    if leader != os.getpid() and _alive(leader):
        time.sleep(GRACE)  # the leader does it
    _kill(_members(leader))
    scratch = Path(os.environ.get(SCRATCH, ""))
    # Where only the parent ended, the owner goes on and uses the folder for a new server. The prefix guards against a
    # variable that names another folder.
    if not _alive(owner) and scratch.name.startswith(PREFIX):
        shutil.rmtree(scratch, ignore_errors=True)
    # No handlers, no atexit: the one registered above waits for ever.
    os._exit(1)


def _members(leader: int) -> list[int]:
    """The other processes of a group."""
    members = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):
            # Processes come and go while /proc is read: ProcessLookupError is an OSError, and names that are no number
            # a ValueError.
            if int(name) != os.getpid() and os.getpgid(int(name)) == leader:
                members.append(int(name))
    return members


def _kill(processes: Iterable[int]) -> None:
    """Kill processes, but for the resource trackers of multiprocessing.

    A tracker removes the semaphores and shared memory that the others leave in /dev/shm, once all of them are gone, and
    then ends by itself.
    """
    for process in processes:
        if not _is_tracker(process):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _is_tracker(process: int) -> bool:
    """Return True if a process runs multiprocessing's resource tracker, and False once it has ended."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _alive(process: int) -> bool:
    """Return True if a process runs. A process that was killed and not yet waited for does not."""
    try:
        # `pid (comm) state ...`: comm may hold blanks and brackets, so it is cut at the last bracket. Z is a zombie, X
        # is dead.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, for an error's text."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
