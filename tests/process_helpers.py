"""Processes as the system shows them, read without the library's own functions."""

import contextlib
import os
import time
from pathlib import Path


def alive(pid):
    """Return True if a process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def group_of(leader):
    """The living processes of a process group."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader and alive(int(entry.name)):
                    result.append(int(entry.name))
            except OSError:
                continue
    return result


def children():
    """The living processes that this one started."""
    result = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and alive(int(name)):
                result.append(int(name))
    return result


def until(condition, seconds, what):
    """Wait for a condition; fail, naming it, when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
