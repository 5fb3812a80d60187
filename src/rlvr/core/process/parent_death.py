"""Processes that end when their owner does, however the owner ends: the code that runs in the started process.

`die_with_parent` watches in a thread and ends the whole group, with its scratch folder. `signal_on_parent_death` is for
a process that must keep one thread, since it forks: the kernel signals it.

Invariant: once `die_with_parent` has returned, neither this process nor any process of its group outlives the owner by
more than a moment, and the owner's scratch folder goes with it. The kernel reports the end of the owner (pidfd),
so nothing polls and a reused id does no harm. Imports nothing that takes time: it comes first in a started process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

OWNER = "RLVR_OWNER"
SCRATCH = "RLVR_SCRATCH"
"""Environment variables of a started process: the id of its owner, with which it ends, and the folder that it removes
if the owner ended first."""
PREFIX = "rlvr-scratch-"
"""Prefix of the names of scratch folders; no other folder is ever removed."""
# PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of linux/prctl.h.
_SET_DEATH_SIGNAL = 1
_SET_SUBREAPER = 36
# Never released: whoever takes it ends the process, and a second caller waits for that.
_leaving = threading.Lock()
# A choice. The leader needs milliseconds; a longer wait keeps processes of a leader that hangs.
GRACE = 2.0
"""Seconds that a group's leader has to end it before another member does."""


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


def signal_on_parent_death(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies, however it dies."""
    _prctl(_SET_DEATH_SIGNAL, how)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of what the children of this process leave behind, so that it can be killed."""
    _prctl(_SET_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":  # elsewhere only the closed socket ends a process
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


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
    killed = kill_all(members(leader))
    scratch = Path(os.environ.get(SCRATCH, ""))
    # Where only the parent ended, the owner goes on and uses the folder for a new server. The prefix guards against a
    # variable that names another folder.
    if not _alive(owner) and scratch.name.startswith(PREFIX):
        # A killed process finishes the system call in which it is, and that may make a file.
        deadline = time.monotonic() + GRACE
        while any(map(_alive, killed)) and time.monotonic() < deadline:
            time.sleep(0.005)
        shutil.rmtree(scratch, ignore_errors=True)
    # No handlers, no atexit: the one registered above waits for ever.
    os._exit(1)


def members(leader: int) -> list[int]:
    """The other processes of a group."""
    members = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):
            # Processes come and go while /proc is read: ProcessLookupError is an OSError, and names that are no number
            # a ValueError.
            if int(name) != os.getpid() and os.getpgid(int(name)) == leader:
                members.append(int(name))
    return members


def kill_all(processes: Iterable[int]) -> list[int]:
    """Kill processes, but for the resource trackers of multiprocessing, and return those that were killed.

    A tracker removes the semaphores and shared memory that the others leave in /dev/shm, once all of them are gone, and
    then ends by itself.
    """
    killed = []
    for process in processes:
        if not is_tracker(process):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                killed.append(process)
    return killed


def is_tracker(process: int) -> bool:
    """Return True if a process runs multiprocessing's resource tracker, and False once it has ended."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _alive(process: int) -> bool:
    """Return True if a process runs. A process that was killed and not yet waited for does not."""
    return state(process) not in (None, "Z", "X")


def state(process: int) -> str | None:
    """The state of a process as proc(5) has it: R for running or ready to run, Z for a zombie, X for dead; None where
    there is no such process."""
    try:
        # `pid (comm) state ...`: comm may hold blanks and brackets, so it is cut at the last bracket.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
