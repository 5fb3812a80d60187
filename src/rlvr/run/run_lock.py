"""One process in a run folder: a lock that the kernel gives back when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import re
import stat
from datetime import datetime
from pathlib import Path

from rlvr.errors import ConfigError, TrainingError
from rlvr.monitor.whole_file import folder_gone, naming

log = logging.getLogger(__name__)
LOCK = "run.lock"


_held: dict[Path, RunLock] = {}
"""The locks of this process."""


def holder_of(lock: Path) -> str | None:
    """The process that holds the lock file, in words; None where none does."""
    try:
        # No link is followed, since it may lead to any file, and a named pipe of that name does not block the opening.
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none, or a link, which is not a lock
        return None
    try:
        # A shared lock is refused only while another process has the exclusive one; it goes when the file is closed.
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

    A trainer of the same process that was not closed gives way: in a notebook, the one of the cell before. The file
    stays. Both it and the folder are locked (flock): the file holds the name of the process, and the lock on the folder
    keeps others out even where the file was removed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        # flock goes by open file, so the older trainer of this process would keep us out as any other process does.
        if (before := _held.get(self._folder)) is not None:
            before.release()
        # The descriptor is kept open for the lock, and by it `check` tells whether the folder is still the same.
        self._directory = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # False, and not None: a file system without locks is warned about in `_take`, and does not end the run.
            if _locked(self._directory) is False:
                raise ConfigError(self._in_use())
            self._file = self._open()
        except BaseException:
            os.close(self._directory)
            raise
        _held[self._folder] = self

    def _open(self) -> int:
        """The file, locked and with our name; its descriptor."""
        path = self._folder / LOCK
        try:
            # No O_TRUNC: before the lock is ours, the text in the file is the holder's.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if path.is_symlink() or path.is_dir():
                raise ConfigError(self._foreign()) from error
            raise
        try:
            self._take(file, path)
        except BaseException:
            os.close(file)  # and with it the lock
            raise
        return file

    def _take(self, file: int, path: Path) -> None:
        """Lock the open file and write our name to it. OSError names it where the disk is full."""
        # Lock, look and only then write: the file may be another run's, or the user's.
        taken = _locked(file)
        if taken is False:
            raise ConfigError(self._in_use())
        if not _is_lock(file):
            raise ConfigError(self._foreign())
        if taken is None:
            log.warning("%s cannot be locked: make sure that no other run writes to it", self._folder)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        with naming(path):
            # Emptied first: a longer line of an earlier holder would show behind ours.
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}, since {since}\n".encode(), 0)

    def _in_use(self) -> str:
        holder = holder_of(self._folder / LOCK) or "another process"
        return (
            f"{self._folder} is in use by {holder}: wait until that run has ended, end it, or choose another run.name"
        )

    def _foreign(self) -> str:
        return (
            f"{self._folder / LOCK} is not a lock that rlvr wrote: nothing there is touched, choose another run.name, "
            "or rename that file"
        )

    def check(self) -> None:
        """TrainingError where the folder is gone or another trainer has taken it; a lock file that was removed is made
        again."""
        if _held.get(self._folder) is not self:
            raise TrainingError(f"{self._folder} was taken over by another trainer of this process: this one stops")
        if not _is_at(self._directory, self._folder):
            raise folder_gone(self._folder)
        # The lock on the folder holds, so nobody got in. The new file says again who is in.
        if not _is_at(self._file, self._folder / LOCK):
            log.warning("%s was removed while its run goes on; it is made again", self._folder / LOCK)
            try:
                again = self._open()
            except ConfigError as error:
                raise TrainingError(str(error)) from error
            except FileNotFoundError as error:  # since it was looked at above
                raise folder_gone(self._folder) from error
            # The old file after the new one is locked, so that there is no moment without.
            os.close(self._file)
            self._file = again

    def release(self) -> None:
        """Give the lock back; nothing where it was given back or taken over."""
        if _held.get(self._folder) is self:
            # The file stays: another process may have opened it already, and would lock a file that nobody else finds.
            del _held[self._folder]
            with contextlib.suppress(OSError):  # where a full disk takes no change
                os.ftruncate(self._file, 0)
            os.close(self._file)
            os.close(self._directory)


def _locked(descriptor: int) -> bool | None:
    """Lock a file or folder for this process; False where another holds it, None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # NFS without a lock daemon, for example, raises ENOLCK or EOPNOTSUPP.
    except OSError:
        return None
    return True


def _is_lock(file: int) -> bool:
    """Return True if an open file is empty or holds what a `RunLock` writes: anything else is the user's."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    head = os.pread(file, 1000, 0)
    # For example `process 4711 on node-3, since 2026-11-23T10:00:00+01:00`; an empty file is one of a released lock.
    return not head or re.fullmatch(rb"process \d+ on [^\n]*\n?", head) is not None


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file or folder is still what `path` leads to."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
