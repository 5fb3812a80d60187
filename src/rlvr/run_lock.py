"""One process in a run folder: a lock that the kernel gives back when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
from datetime import datetime
from pathlib import Path

from rlvr.errors import ConfigError

log = logging.getLogger(__name__)
LOCK = "run.lock"


_held: dict[Path, RunLock] = {}
"""The locks of this process."""


def holder_of(lock: Path) -> str | None:
    """The process that holds the lock file, in words; None where none does."""
    file = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(file, 1000, 0).decode(errors="replace").strip() or "a process that did not say its name"
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(file)
    return None


class RunLock:
    """Held from construction to `release`. ConfigError names the holder where there is another.

    A trainer of the same process that was not closed gives way: in a notebook, the one of the cell before. The file stays; what
    counts is the lock on it (flock). It says who holds it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        if (before := _held.get(self._folder)) is not None:
            before.release()
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            holder = holder_of(folder / LOCK)
            raise ConfigError(
                f"{folder} is in use by {holder}: wait until that run has ended, end it, or choose another run.name"
            ) from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s): make sure that no other run writes to it", folder, error)
        os.ftruncate(self._file, 0)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        os.pwrite(self._file, f"process {os.getpid()} on {platform.node()}, since {since}\n".encode(), 0)
        _held[self._folder] = self

    def release(self) -> None:
        """Give the lock back; nothing where it was given back or taken over."""
        if _held.get(self._folder) is self:
            del _held[self._folder]
            os.ftruncate(self._file, 0)
            os.close(self._file)
